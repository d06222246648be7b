"""The limits of HTTP: what is too large, too slow, too much, too late or no HTTP is refused,
and says so.
"""

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from edge.bundle.bundle_format import read_bundle
from edge.http import app as web
from edge.http import inference_protocol
from edge.http import request as intake
from edge.http.app import BATCH, App
from edge.http.prometheus_metrics import Metrics
from edge.inference.pipeline import NullConsumer, Pipeline
from edge.inference.predictor import Outputs, Predictor
from edge.inference.served_model import Model
from tests.support.tiny_bundle import RED, tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("http") / "bundle").folder


@contextlib.asynccontextmanager
async def client(bundle: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Pipeline]]:
    """A client of the application itself, without a process or a socket."""
    line = Pipeline(Model(Predictor(read_bundle(bundle))), NullConsumer())
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

    assert (
        run(bundle, lambda found, _: found.post("/classify", content=stalled())).status_code == 408
    )


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
        requests = [
            asyncio.ensure_future(found.post("/classify", content=RED))
            for _ in range(intake.MAX_WAITING + 1)
        ]
        refused, waiting = await asyncio.wait(
            requests, timeout=60, return_when=asyncio.FIRST_COMPLETED
        )
        busy.set()
        return [
            *(r.result().status_code for r in refused),
            *[(await w).status_code for w in waiting],
        ]

    assert run(bundle, many) == [503] + [200] * intake.MAX_WAITING


# ---------------------------------------------------------------- programs that ask for much

MANY = 200  # images
FILES = {
    "name": "image",
    "datatype": "BYTES",
    "shape": [MANY],
    "data": [base64.b64encode(RED).decode()] * MANY,
}


def asked(bundle: Path, change: Callable[[Pipeline, asyncio.Event], None]) -> tuple[int, int]:
    """The status of an answer about many images, and how many batches are computed,
    if this happens at the second.
    """

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
        await App(line, Metrics())(
            {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []},
            receive,
            send,
        )
        return answers[0]["status"], batches

    with contextlib.closing(
        Pipeline(Model(Predictor(read_bundle(bundle))), NullConsumer())
    ) as line:
        return asyncio.run(answer(line))


def test_what_a_client_has_asked_that_hangs_up_is_not_computed_to_the_end(bundle):
    assert asked(bundle, lambda _line, _gone: None) == (200, MANY / BATCH)
    status, batches = asked(bundle, lambda _, gone: gone.set())
    assert (status, batches < 5) == (400, True)


def test_a_line_that_shuts_down_ends_a_long_answer_at_the_next_batch(bundle):
    assert asked(bundle, lambda line, _: setattr(line, "draining", True)) == (503, 2)


def test_a_large_body_is_read_where_nobody_waits_for_it_even_if_its_json_is_short(
    bundle, monkeypatch
):
    threads, parse = [], inference_protocol.parse
    monkeypatch.setattr(
        inference_protocol,
        "parse",
        lambda *given: (threads.append(threading.current_thread()), parse(*given))[1],
    )
    head = json.dumps({"inputs": [FILES | {"data": []}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    run(
        bundle,
        lambda found, _: found.post(
            "/v2/models/tiny/infer", content=head + bytes(2 << 20), headers=headers
        ),
    )
    assert threads[0] is not threading.main_thread()


def infer(bundle: Path, **asked: Any) -> httpx.Response:
    body = json.dumps({"inputs": [FILES], **asked}).encode()
    return run(bundle, lambda found, _: found.post("/v2/models/tiny/infer", content=body))


def test_a_large_response_is_built_where_nobody_waits_for_it(bundle, monkeypatch):
    threads, build = [], inference_protocol.build_response
    monkeypatch.setattr(
        inference_protocol,
        "build_response",
        lambda *given: (threads.append(threading.current_thread()), build(*given))[1],
    )
    small = infer(bundle).json()
    monkeypatch.setattr(web, "FEW", 2 * MANY)
    assert infer(bundle).json() == small
    assert [each is threading.main_thread() for each in threads] == [True, False]


def test_a_response_written_in_pieces_has_the_same_bytes(bundle, monkeypatch):
    whole = infer(bundle, id="7").content
    monkeypatch.setattr(inference_protocol, "PIECE", 7)
    assert infer(bundle, id="7").content == whole
    [output] = json.loads(whole)["outputs"]
    assert whole.index(msgspec.json.encode(output["data"])) > 0


def test_a_response_that_would_be_too_large_is_refused_after_the_first_images(bundle, monkeypatch):
    monkeypatch.setattr(inference_protocol, "MAX_WRITTEN", 3 * MANY - 1)
    answer = infer(bundle)
    assert answer.status_code == 400
    assert "binary" in answer.json()["error"]
    output = {"name": "probabilities", "parameters": {"binary_data": True}}
    assert infer(bundle, outputs=[output]).status_code == 200
    monkeypatch.setattr(inference_protocol, "MAX_WRITTEN", 3 * MANY)
    assert infer(bundle).status_code == 200


def test_clients_that_announce_a_body_and_send_none_keep_nobody_out(bundle):
    async def crowd(found: httpx.AsyncClient, _: Pipeline) -> httpx.Response:
        begun, ending = asyncio.Semaphore(0), asyncio.Event()

        async def nothing() -> AsyncIterator[bytes]:
            begun.release()
            await ending.wait()
            yield b""

        silent = [
            asyncio.create_task(found.post("/classify", content=nothing())) for _ in range(24)
        ]
        for _ in silent:
            await begun.acquire()
        answer = await found.post("/classify", content=RED)
        ending.set()
        await asyncio.gather(*silent)
        return answer

    assert run(bundle, crowd).status_code == 200
