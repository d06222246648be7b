"""The limits of HTTP: what is too large, too slow, too much, too late or no HTTP is refused, and says so."""

import asyncio
import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.bundle.bundle_format import read_bundle
from edge.daemon.prometheus_metrics import Metrics
from edge.http import inference_protocol
from edge.http import request as intake
from edge.http.app import BATCH, App
from edge.inference.pipeline import NullOutbox, Pipeline
from edge.inference.predictor import Outputs, Predictor
from edge.inference.served_model import Model
from tests.edge.daemon.test_daemon import Daemon, daemon
from tests.support.tiny_bundle import RED, tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("http") / "bundle").folder


@contextlib.asynccontextmanager
async def client(bundle: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Pipeline]]:
    """A client of the application itself, without a process or a socket."""
    line = Pipeline(Model(Predictor(read_bundle(bundle))), NullOutbox())
    with contextlib.closing(line):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(App(line, Metrics())), base_url="http://line"
        ) as found:
            yield found, line


def run(bundle: Path, request) -> httpx.Response:
    async def answer() -> httpx.Response:
        async with client(bundle) as (found, line):
            return await request(found, line)

    return asyncio.run(answer())


def test_an_image_beyond_the_size_limit_is_refused_while_it_streams(bundle, monkeypatch):
    monkeypatch.setattr(intake, "MAX_BYTES", 1 << 20)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 18
            yield bytes(1 << 18)

    answer = run(bundle, lambda found, _: found.post("/classify", content=endless()))
    assert answer.status_code == 413
    assert answer.json()["remedy"]
    assert sent <= (1 << 20) + (1 << 19)


def test_an_image_that_does_not_arrive_in_time_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(intake, "UPLOAD", 0.02)

    async def stalled() -> AsyncIterator[bytes]:
        yield RED[:10]
        await asyncio.Event().wait()

    assert run(bundle, lambda found, _: found.post("/classify", content=stalled())).status_code == 408


def test_a_draining_line_takes_no_image_and_is_not_ready(bundle):
    async def both(found: httpx.AsyncClient, line: Pipeline) -> httpx.Response:
        line.draining = True
        assert (await found.get("/v2/health/ready")).status_code == 503
        assert (await found.get("/v2/health/live")).status_code == 200
        return await found.post("/classify", content=RED)

    answer = run(bundle, both)
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]


def test_more_images_than_may_wait_are_refused_and_the_others_judged(bundle):
    async def many(found: httpx.AsyncClient, line: Pipeline) -> list[int]:
        busy = threading.Event()
        line._worker.submit(busy.wait)
        requests = [asyncio.ensure_future(found.post("/classify", content=RED)) for _ in range(intake.MAX_WAITING + 1)]
        refused, waiting = await asyncio.wait(requests, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        busy.set()
        return [*(r.result().status_code for r in refused), *[(await w).status_code for w in waiting]]

    assert run(bundle, many) == [503] + [200] * intake.MAX_WAITING


# ---------------------------------------------------------------- programs that ask for much

MANY = 200  # images
FILES = {"name": "image", "datatype": "BYTES", "shape": [MANY], "data": [base64.b64encode(RED).decode()] * MANY}


def asked(bundle: Path, change: Callable[[Pipeline, asyncio.Event], None]) -> tuple[int, int]:
    """The status of an answer about many images, and how many batches are computed, if this happens at the second."""

    async def answer(line: Pipeline) -> tuple[int, int]:
        batches, gone, infer = 0, asyncio.Event(), line.infer
        bodies, answers = [json.dumps({"inputs": [FILES]}).encode()], []

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)

        async def counted(*arguments: Any) -> Outputs:
            nonlocal batches
            batches += 1
            if batches == 2:
                change(line, gone)
            return await infer(*arguments)

        line.infer = counted  # type: ignore[method-assign]
        path = "/v2/models/tiny/infer"
        await App(line, Metrics())({"method": "POST", "path": path, "query_string": b"", "headers": []}, receive, send)
        return answers[0]["status"], batches

    with contextlib.closing(Pipeline(Model(Predictor(read_bundle(bundle))), NullOutbox())) as line:
        return asyncio.run(answer(line))


def test_what_a_client_has_asked_that_hangs_up_is_not_computed_to_the_end(bundle):
    assert asked(bundle, lambda _line, _gone: None) == (200, MANY / BATCH)
    status, batches = asked(bundle, lambda _, gone: gone.set())
    assert (status, batches < 5) == (400, True)


def test_a_line_that_shuts_down_ends_a_long_answer_at_the_next_batch(bundle):
    assert asked(bundle, lambda line, _: setattr(line, "draining", True)) == (503, 2)


def test_a_large_body_is_read_where_nobody_waits_for_it_even_if_its_json_is_short(bundle, monkeypatch):
    threads, parse = [], inference_protocol.parse
    monkeypatch.setattr(
        inference_protocol, "parse", lambda *given: (threads.append(threading.current_thread()), parse(*given))[1]
    )
    head = json.dumps({"inputs": [FILES | {"data": []}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    run(bundle, lambda found, _: found.post("/v2/models/tiny/infer", content=head + bytes(2 << 20), headers=headers))
    assert threads[0] is not threading.main_thread()


# ---------------------------------------------------------------- connections

BOUNDS = """
import edge.http.server as server
server.MAX_CONNECTIONS, server.HEAD_TIME, server.LINGER, server.SEND_TIME = 20, 0.3, 0.3, 0.3
"""


@pytest.fixture(scope="module")
def bounded(bundle: Path) -> Iterator[Daemon]:
    """A daemon with little patience."""
    with daemon(bundle, before=BOUNDS) as line:
        yield line


def connect(line: Daemon) -> socket.socket:
    return socket.create_connection((line.url.host, line.url.port), timeout=5)


def to_the_end(connection: socket.socket) -> bytes:
    """All that is said until the connection ends, however it ends."""
    found = b""
    with connection, contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def until(connection: socket.socket, end: bytes) -> None:
    """Read up to what a successful answer ends with."""
    found = b""
    while not found.endswith(end):
        found += connection.recv(1 << 16)
    assert found.startswith(b"HTTP/1.1 200 "), found


def test_a_client_that_closes_its_connection_is_not_computed_for_any_more(bounded: Daemon) -> None:
    body = json.dumps({"inputs": [FILES | {"shape": [1000], "data": FILES["data"] * 5}]}).encode()
    head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connect(bounded) as closing:
        closing.sendall(head + body)
        closing.shutdown(socket.SHUT_WR)  # as `close` does, but that its answer can be read
        assert b"the connection ended before" in to_the_end(closing)


@pytest.mark.parametrize("begun", [b"GET / HT", b"POST /classify HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_request_whose_head_does_not_end_ends_its_connection(bounded: Daemon, begun: bytes) -> None:
    slow = connect(bounded)
    slow.sendall(begun)
    assert to_the_end(slow).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_drips_does_not_hold_its_connection(bounded: Daemon) -> None:
    slow = connect(bounded)
    slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert slow.recv(1000).startswith(b"HTTP/1.1 405 ")
    with slow, contextlib.suppress(ConnectionError):
        for _ in range(500):
            slow.sendall(b"x")
            time.sleep(0.01)
        pytest.fail("it drips for five seconds")


def test_a_client_that_does_not_read_does_not_hold_its_connection(bounded: Daemon) -> None:
    with connect(bounded) as deaf, contextlib.suppress(ConnectionError):
        for _ in range(100_000):
            deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
        pytest.fail("it took all requests")


@pytest.mark.parametrize(
    "head",
    [b"X: " + b"x" * 500_000, b"X: x\r\n" * 100_000, b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 500_000],
)
def test_a_head_or_a_trailer_without_end_is_refused(bounded: Daemon, head: bytes) -> None:
    endless = connect(bounded)
    with contextlib.suppress(ConnectionError):
        endless.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + head)
    assert to_the_end(endless)[:13] in (b"HTTP/1.1 431 ", b"HTTP/1.1 200 ", b"")


def test_a_client_that_has_said_all_is_answered(bounded: Daemon) -> None:
    two = connect(bounded)
    two.sendall(b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(RED), RED) * 2 + b"GET")
    two.shutdown(socket.SHUT_WR)
    assert to_the_end(two).count(b'"label":"red"') == 2


def test_what_is_no_http_is_told_so_in_json(bounded: Daemon) -> None:
    stranger = connect(bounded)
    stranger.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    answer = to_the_end(stranger)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"remedy"' in answer


def test_chunks_of_one_byte_are_a_body_like_any_other(bounded: Daemon) -> None:
    answer = bounded.client.post("/classify", content=(RED[at : at + 1] for at in range(len(RED))))
    assert answer.json()["label"] == "red"


def test_new_connections_take_the_place_of_idle_ones_and_there_are_never_more(bounded: Daemon) -> None:
    with contextlib.ExitStack() as closing:
        idle = []
        for number in range(19):
            idle.append(closing.enter_context(connect(bounded)))
            if number % 2:  # the others have not said anything yet
                idle[-1].sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
                until(idle[-1], b"}")
        busy = []
        for _ in range(20):
            busy.append(closing.enter_context(connect(bounded)))
            busy[-1].sendall(b"GET / HT")
        refused = connect(bounded)
        assert to_the_end(refused).startswith(b"HTTP/1.1 503 ")
        assert [each.recv(1) for each in idle] == [b""] * 19
        assert all(each.recv(13) == b"HTTP/1.1 408 " for each in busy)
    assert bounded.classify(RED).json()["label"] == "red"
