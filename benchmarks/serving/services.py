"""Services as processes, and one kept connection to each."""

import base64
import contextlib
import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image

from edge.bundle.bundle_format import Manifest

_PATIENCE = 60.0  # seconds for a service to be ready


class Questions(NamedTuple):
    """How a service is asked about an array of the network's size, and about an image file,
    if it takes any.
    """

    tensor: bytes
    image: bytes | None = None


class Service:
    """A process that answers, and a connection to it."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        address: int | Path,
        ready: float,
        questions: Questions,
    ) -> None:
        self.ready = ready  # seconds from its start
        self.questions = questions
        self._id = process.pid
        if isinstance(address, int):
            self._socket = socket.create_connection(("127.0.0.1", address))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(address))

    def ask(self, question: bytes) -> None:
        """One answer, which must be a success."""
        self._socket.sendall(question)
        answer = self._more()
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._more()
        assert answer.startswith(b"HTTP/1.1 200"), answer
        _, _, rest = answer[:end].lower().partition(b"content-length:")
        left = end + 4 + int(rest.split(b"\r\n")[0]) - len(answer)
        while left > 0:
            left -= len(self._more())

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 16)
        assert data, "the service has hung up"
        return data

    def processor(self) -> float:
        """Seconds of processor time, of all its processes."""
        return sum(sum(each.cpu_times()[:2]) for each in _tree(self._id))

    def memory(self) -> float:
        """MB in use, of all its processes."""
        return sum(each.memory_info().rss for each in _tree(self._id)) / 1e6

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _tree(number: int) -> list[psutil.Process]:
    process = psutil.Process(number)
    return [*process.children(recursive=True), process]


@contextlib.contextmanager
def daemon(
    folder: Path, manifest: Manifest, threads: int, pixels: NDArray[np.uint8]
) -> Iterator[Service]:
    """Ours: `edge-node serve`."""
    command = [
        sys.executable,
        "-c",
        "from edge_node.cli.main import main; main()",
        "serve",
        str(folder),
    ]
    command += ["--port", "0", "--threads", str(threads)]
    with _started(command) as (process, start):
        assert process.stderr
        port = next(
            int(line.rpartition(":")[2]) for line in process.stderr if line.startswith("ready ")
        )
        ready = time.perf_counter() - start
        tensor = {"name": "image", "datatype": "UINT8", "shape": [1, *pixels.shape]}
        wanted = [{"name": manifest.output, "parameters": {"binary_data": True}}]
        asked = {
            "inputs": [tensor | {"parameters": {"binary_data_size": pixels.size}}],
            "outputs": wanted,
        }
        head = json.dumps(asked).encode()
        path = f"/v2/models/{manifest.node}/infer"
        questions = Questions(
            _post(path, head + pixels.tobytes(), f"Inference-Header-Content-Length: {len(head)}"),
            _post("/classify", _jpeg(pixels)),
        )
        with contextlib.closing(Service(process, port, ready, questions)) as service:
            yield service


@contextlib.contextmanager
def plain(folder: Path, threads: int, pixels: NDArray[np.uint8]) -> Iterator[Service]:
    """FastAPI's."""
    questions = Questions(_post("/tensor", pixels.tobytes()), _post("/image", _jpeg(pixels)))
    with _module("fastapi_service", folder, threads, questions) as service:
        yield service


@contextlib.contextmanager
def lit(folder: Path, threads: int, pixels: NDArray[np.uint8]) -> Iterator[Service]:
    """LitServe's."""

    def question(name: str, data: bytes) -> bytes:
        body = json.dumps({name: base64.b64encode(data).decode()}).encode()
        return _post("/predict", body, "Content-Type: application/json")

    questions = Questions(question("tensor", pixels.tobytes()), question("image", _jpeg(pixels)))
    with _module("litserve_service", folder, threads, questions) as service:
        yield service


@contextlib.contextmanager
def bare_protocol(
    folder: Path, threads: int, pixels: NDArray[np.uint8], path: Path | None = None
) -> Iterator[Service]:
    """The least that HTTP takes, over TCP or at a Unix socket's path."""
    questions = Questions(_post("/", pixels.tobytes()))
    with _module("protocol_service", folder, threads, questions, path) as service:
        yield service


@contextlib.contextmanager
def _module(
    name: str, folder: Path, threads: int, questions: Questions, path: Path | None = None
) -> Iterator[Service]:
    address = path or _free_port()
    command = [
        sys.executable,
        "-m",
        f"benchmarks.serving.{name}",
        str(folder),
        str(threads),
        str(address),
    ]
    with _started(command) as (process, start):
        _until(lambda: _answers(process, address, questions))
        with contextlib.closing(
            Service(process, address, time.perf_counter() - start, questions)
        ) as service:
            yield service


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], float]]:
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, start
        finally:
            for each in _tree(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.terminate()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "a service does not answer"
        time.sleep(0.01)


def _answers(process: subprocess.Popen[str], address: int | Path, questions: Questions) -> bool:
    assert process.poll() is None, process.communicate()
    try:
        with contextlib.closing(Service(process, address, 0, questions)) as service:
            service.ask(questions.tensor)
    except (OSError, AssertionError):  # not yet there, or its model is not
        return False
    return True


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


def _jpeg(pixels: NDArray[np.uint8]) -> bytes:
    """A file of twice the network's size, so that decoding resizes as it does on a line."""
    out = io.BytesIO()
    size = 2 * pixels.shape[0]
    Image.fromarray(pixels).resize((size, size)).save(out, "JPEG")
    return out.getvalue()
