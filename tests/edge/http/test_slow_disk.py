"""A disk that is slow, or a network share that hangs, keeps those waiting who need it, and nobody
else: no handler touches a file on the event loop.
"""

import asyncio
import builtins
import contextlib
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response

from broker_config.storage import disk
from edge.http.app import App
from edge.http.login import Accounts, Logins
from edge.http.prometheus_metrics import Metrics
from edge.http.web_app import Route, WebApp
from edge.labelling import label_queue
from edge.page import label_page
from edge.page.label_page import LabelPage
from edge.page.line_page import LinePage
from edge.page.recent_inspections import RecentInspections
from edge.uncertainty.image_retention import ImageRetention
from edge.uncertainty.image_retention import Settings as RetentionSettings
from tests.support.classified_images import Told, a_line, judged_bundle, picture, shown
from tests.support.paths import REPOSITORY
from tests.support.recorded_run import RUN, record_run
from tests.support.tiny_bundle import RED
from trainer.console import console
from trainer.console.federation_folder import FederationFolder

ANNA = {"name": "anna", "password": "correct horse"}


class SlowDisk:
    """What a thread wants of files in a folder waits; on the event loop it is a mistake."""

    CALLS = (
        (builtins, "open"),
        (io, "open"),
        (os, "open"),
        (os, "stat"),
        (os, "listdir"),
        (os, "scandir"),
        (os, "unlink"),
        (os, "mkdir"),
        (os, "replace"),
    )

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The program's own files are on a disk, too."""
        self.mistakes: list[str] = []
        self._folders = tuple(map(str, (folder, REPOSITORY / "edge", REPOSITORY / "trainer")))
        self._is_slow = False
        self._goes_on = threading.Event()
        for module, name in self.CALLS:
            monkeypatch.setattr(module, name, self._slowed(name, getattr(module, name)))

    def _slowed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(path: Any = ".", *rest: Any, **options: Any) -> Any:
            if self._is_slow and str(path).startswith(self._folders):
                if threading.current_thread() is threading.main_thread():
                    self.mistakes.append(f"{name} {path}")
                else:
                    self._goes_on.wait(60)
            return call(path, *rest, **options)

        return slowed

    @contextlib.contextmanager
    def being_slow(self) -> Iterator[None]:
        """Let the disk hang until the context is left."""
        self._goes_on.clear()
        self._is_slow = True
        try:
            yield
        finally:
            self._is_slow = False
            self._goes_on.set()


async def ask(
    disk: SlowDisk,
    client: httpx.AsyncClient,
    other: str,
    method: str,
    path: str,
    content: dict[str, Any] | bytes | None,
) -> int:
    """Return the status of a request to a slow disk, during which another one is answered."""
    options = {"content": content} if isinstance(content, bytes) else {"json": content}
    with disk.being_slow():
        waiting = asyncio.create_task(client.request(method, path, **options))  # type: ignore[arg-type]
        for _ in range(3):
            await asyncio.sleep(0.01)  # the handler comes to the disk meanwhile
            assert (await client.get(other)).status_code == 200
    return (await waiting).status_code


def routes_of(app: WebApp) -> list[Route]:
    return [route for route in app.routes if isinstance(route, Route)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_bundle(tmp_path_factory.mktemp("bundle") / "a")


@pytest.fixture
def line(tmp_path: Path, bundle: Path) -> Iterator[tuple[App, RecentInspections]]:
    """A line with two kept images, and a login."""
    Accounts(tmp_path / "state").set(**ANNA)
    recent = RecentInspections(Told())
    kept = RetentionSettings(path=str(tmp_path / "kept"), what="all")
    retention = ImageRetention(kept)
    pipeline = a_line(bundle, recent, recent.observe, retention)
    random = np.random.default_rng(1)
    shown(pipeline, [picture(random, number, strong=80) for number in range(2)])
    retention._queue.join()
    settings = label_queue.Settings(path=str(tmp_path / "images"))
    queue = label_queue.LabelQueue(settings, "line-1", lambda: retention)
    labels = LabelPage("line-1", pipeline, recent, queue)
    pages = [*LinePage("line-1", pipeline, recent, lambda: None, labels).routes, *labels.routes]
    logins = Logins(Accounts(tmp_path / "state"), penalty=0)
    yield App(pipeline, Metrics(), pages=pages, logins=logins), recent
    labels.close()
    retention.close()
    pipeline.close()


def test_a_line_answers_others_while_a_request_waits_for_the_disk(
    tmp_path: Path,
    line: tuple[App, RecentInspections],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, recent = line
    monkeypatch.setattr(label_page, "LOOK_AGAIN", 0.0)
    disk = SlowDisk(tmp_path, monkeypatch)
    last = recent.snapshot()["last"].id
    [one, two] = sorted(path.name for path in (tmp_path / "kept").glob("*.png"))
    contents: dict[str, dict[str, Any] | bytes] = {
        "/classify": RED,
        "/labels/label": {"images": [one], "label": None},
        "/labels/overrule": {"id": last},
        "/login": ANNA,
    }

    async def run() -> dict[str, int]:
        transport = httpx.ASGITransport(app)
        found = {}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/login", json=ANNA)
            routes = sorted(routes_of(app), key=lambda route: route.method == "DELETE")
            for route in routes:
                path = route.path.replace("{id}", last)
                path = path.replace("{name}", two if "pictures" in path else "tiny")
                path = path.replace("{version}", "1")
                content = contents.get(route.path) if route.method == "POST" else None
                found[f"{route.method} {path}"] = await ask(
                    disk, client, "/v2/health/live", route.method, path, content
                )
        return found

    found = asyncio.run(run())
    assert disk.mistakes == []
    assert {status for status in found.values() if status >= 500} == set(), found
    for path in ("GET /line/state", "GET /labels/queue", "POST /labels/label", "POST /login"):
        assert found[path] == 200, found


def test_a_label_waits_for_no_picture(
    tmp_path: Path,
    line: tuple[App, RecentInspections],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pictures of large images, asked for on many connections, once kept a label for 15 s."""
    app, _ = line
    goes_on = threading.Event()

    def draw(_queue: label_queue.LabelQueue, _name: str, _side: int) -> bytes:
        goes_on.wait(60)
        return b"a picture"

    monkeypatch.setattr(label_queue.LabelQueue, "picture", draw)
    [one, _] = sorted(path.name for path in (tmp_path / "kept").glob("*.png"))

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/login", json=ANNA)
            pictures = []
            for _ in range(label_page.MOST_PICTURES + 2):
                pictures.append(asyncio.create_task(client.get(f"/labels/pictures/{one}")))
                await asyncio.sleep(0)
            labels = {"images": [one], "label": None}
            assert (await client.post("/labels/label", json=labels)).json() == {
                "labelled": 1,
                "gone": [],
            }
            goes_on.set()
            return [answer.status_code for answer in await asyncio.gather(*pictures)]

    found = asyncio.run(run())
    assert sorted(found) == label_page.MOST_PICTURES * [200] + 2 * [503]


def test_a_console_answers_others_while_a_request_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path, nodes=2, rounds=3, contributed=1)
    Accounts(tmp_path).set(**ANNA)
    # at each look so much later that the folder is read again
    page = console.Console([FederationFolder(tmp_path)], itertools.count().__next__)

    async def live(_: Request) -> Response:
        return Response(b"")

    routes = [*page.routes, Route("/live", "GET", live)]
    server = WebApp(routes, logins=Logins(Accounts(tmp_path), penalty=0))

    async def run() -> dict[str, int]:
        found = {}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(server), base_url="http://localhost"
        ) as client:
            await client.post("/login", json=ANNA)
            for route in routes_of(server):
                method = "HEAD" if route.path.endswith("events") else route.method
                path = route.path.replace("{id}", RUN)
                content = {"what": "pause"} if path.endswith("actions") else None
                if route.path == "/login" and method == "POST":
                    content = ANNA
                found[f"{method} {path}"] = await ask(slow, client, "/live", method, path, content)
        return found

    async def first_of_stream() -> bytes:
        with slow.being_slow():
            stream = page._stream_to(console._Stream("", "192.0.2.1"))
            piece = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)  # it comes to the disk meanwhile
            assert not piece.done()
        found = await piece
        await stream.aclose()
        return found

    slow = SlowDisk(tmp_path, monkeypatch)
    with disk.lock_folder(tmp_path):
        found = asyncio.run(run())
        assert asyncio.run(first_of_stream()).startswith(b"data: ")
    assert slow.mistakes == []
    assert found.pop(f"POST /console/runs/{RUN}/actions") == 202
    assert {status for status in found.values() if status >= 400} == set(), found
