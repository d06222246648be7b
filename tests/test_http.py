"""The limits of HTTP: what is too large, too slow, too much or too late is refused, and says so."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from edge import http
from edge.bundle import read
from edge.line import Line, Model, Nowhere
from edge.predictor import Predictor
from tests.tiny_bundle import RED, tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("http") / "bundle").folder


@contextlib.asynccontextmanager
async def client(bundle: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Line]]:
    """A client of the application itself, without a process or a socket."""
    line = Line(Model(Predictor(read(bundle))), Nowhere())
    with contextlib.closing(line):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(http.App(line)), base_url="http://line") as found:
            yield found, line


def run(bundle: Path, request) -> httpx.Response:
    async def answer() -> httpx.Response:
        async with client(bundle) as (found, line):
            return await request(found, line)

    return asyncio.run(answer())


def test_an_image_beyond_the_size_limit_is_refused_while_it_streams(bundle, monkeypatch):
    monkeypatch.setattr(http, "MAX_BYTES", 1 << 20)
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
    monkeypatch.setattr(http, "UPLOAD", 0.02)

    async def stalled() -> AsyncIterator[bytes]:
        yield RED[:10]
        await asyncio.Event().wait()

    assert run(bundle, lambda found, _: found.post("/classify", content=stalled())).status_code == 408


def test_a_draining_line_takes_no_image_and_is_not_ready(bundle):
    async def both(found: httpx.AsyncClient, line: Line) -> httpx.Response:
        line.draining = True
        assert (await found.get("/v2/health/ready")).status_code == 503
        assert (await found.get("/v2/health/live")).status_code == 200
        return await found.post("/classify", content=RED)

    answer = run(bundle, both)
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]


def test_more_images_than_may_wait_are_refused_and_the_others_judged(bundle):
    async def many(found: httpx.AsyncClient, line: Line) -> list[int]:
        busy = threading.Event()
        line._worker.submit(busy.wait)
        requests = [asyncio.ensure_future(found.post("/classify", content=RED)) for _ in range(http.MAX_WAITING + 1)]
        refused, waiting = await asyncio.wait(requests, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        busy.set()
        return [*(r.result().status_code for r in refused), *[(await w).status_code for w in waiting]]

    assert run(bundle, many) == [503] + [200] * http.MAX_WAITING
