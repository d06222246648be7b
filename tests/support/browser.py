"""A real browser for tests: chromium without a window, driven through its DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Page:
    """One tab. `problems` are errors and warnings of the console, `requests` the URLs that were asked for."""

    def __init__(self, socket: ClientConnection):
        self._socket, self._ids = socket, itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := self._receive()).get("id") != number:
            pass
        assert "error" not in message, message
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv(timeout=60))
        told = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(told["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning"):
                self.problems.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.problems.append(told["entry"]["text"])
        self._events.append(message.get("method", ""))
        return message

    def open(self, url: str) -> None:
        """Load a page, to its end."""
        self.requests.clear()
        self._events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def look(self, *, width: int = 1200, theme: str = "light") -> None:
        """Change the window's width and the system's theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def browse(folder: Path) -> Iterator[Page]:
    """A fresh browser with its profile in `folder`, and a tab in it."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
         "--disable-background-networking", f"--user-data-dir={folder}", "about:blank"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("DevTools listening on "))
        browser = line.split()[-1]
        with connect(browser, max_size=None) as socket:
            socket.send(json.dumps({"id": 0, "method": "Target.getTargets"}))
            while (answer := json.loads(socket.recv(timeout=60))).get("id") != 0:
                pass
        target = next(each for each in answer["result"]["targetInfos"] if each["type"] == "page")
        address = browser.rpartition("/devtools/")[0] + f"/devtools/page/{target['targetId']}"
        with connect(address, max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.communicate(timeout=60)
