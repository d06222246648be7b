"""The daemon as a process of its own, and a client of it."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

RUNNER = """
import json, sys
from pathlib import Path
from broker_config.protocol.errors import EdgeNodeError
from edge.config.instance import Instance
from edge.daemon.daemon import serve
from edge.daemon.line_settings import Settings, add_options
options = json.loads(sys.argv[1])
bundle = Path(options.pop("bundle"))
settings = add_options(Settings(), *(options.pop(name, None) for name in ("watch", "output", \
"mqtt")))
try:
    sys.exit(serve(bundle, settings, Instance("line-1", bundle.parent / "state"), \
**{"port": 0} | options))
except EdgeNodeError as error:
    sys.exit(str(error))
"""
BLOCK_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "onnx"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocker())
for name in ("torch", "torchvision", "onnx"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} can be imported")
"""


def start(bundle: Path, before: str = "", **options: object) -> subprocess.Popen[str]:
    """The daemon as a process; `before` runs first in it."""
    arguments = json.dumps({"bundle": str(bundle)} | options, default=str)
    command = [sys.executable, "-c", before + RUNNER, arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Daemon:
    """A daemon that is ready."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = httpx.URL(url)
        self.client = httpx.Client(base_url=url, timeout=60)
        self.said = ""  # on standard error, before it was ready

    def classify(self, data: bytes, name: str = "part") -> httpx.Response:
        return self.client.post("/classify", params={"name": name}, content=data)

    def outcomes(self, count: int) -> list[dict[str, Any]]:
        """The next JSON lines from its standard output."""
        assert self.process.stdout
        return [json.loads(self.process.stdout.readline()) for _ in range(count)]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Signal it; its exit code and what else it wrote."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextlib.contextmanager
def daemon(bundle: Path, before: str = "", **options: object) -> Iterator[Daemon]:
    """The daemon on one bundle, ready; `before` runs first in its process."""
    with start(bundle, before, **options) as process:
        try:
            assert process.stderr
            said = []
            while not (line := process.stderr.readline()).startswith("ready "):
                said.append(line)
                assert line, "the daemon ended before it was ready"
            running = Daemon(process, line.split()[1])
            running.said = "".join(said)
            with running.client:
                yield running
        finally:
            process.kill()


@contextlib.contextmanager
def serving_daemon(memory: Path, *arguments: object) -> Iterator[Daemon]:
    """`edge-node serve`, ready, with what it has in `memory`."""
    command = [
        sys.executable,
        "-m",
        "edge_node",
        "serve",
        "--port",
        "0",
        "--state",
        str(memory),
        *map(str, arguments),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr
            said = []
            for line in process.stderr:
                if line.startswith("ready "):
                    break
                said.append(line)
            else:
                raise AssertionError("".join(said))
            # or its pipe would fill
            threading.Thread(target=process.stderr.read, daemon=True).start()
            found = Daemon(process, line.split()[1])
            found.said = "".join(said)
            with found.client:
                yield found
        finally:
            process.kill()
