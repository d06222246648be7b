"""Each request gets an answer: its route's, or an error with a remedy."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from broker_config.protocol.errors import EdgeNodeError
from edge.http.request import json_response
from edge.http.web_app import EventStream, Route, WebApp


def ask(method: str, path: str) -> tuple[httpx.Response, list[tuple[str, int]]]:
    """An answer, and what was observed."""
    observed = []

    async def named(request: Request) -> Response:
        return json_response([request.method, request.path_params])

    async def full(_: Request) -> Response:
        raise EdgeNodeError("the disk is full", "make room")

    async def broken(_: Request) -> Response:
        raise ZeroDivisionError

    async def run() -> httpx.Response:
        routes = [
            Route("/parts/{id}", "GET", named),
            Route("/parts/{id}", "DELETE", named),
            Route("/full", "GET", full),
            Route("/broken", "GET", broken),
        ]
        app = WebApp(routes, observe=lambda path, status, _: observed.append((path, status)))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return await client.request(method, path)

    return asyncio.run(run()), observed


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_path_may_have_several_methods_and_gives_its_handler_what_stands_in_it(
    method: str,
) -> None:
    answer, observed = ask(method, "/parts/7")
    assert answer.json() == [method, {"id": "7"}]
    assert observed == [("/parts/{id}", 200)]


def test_another_method_is_told_which_ones_there_are() -> None:
    answer, _ = ask("POST", "/parts/7")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, DELETE, HEAD")


def test_an_unknown_path_and_failures_are_answered_and_observed() -> None:
    found = {path: ask("GET", path) for path in ("/parts/7/8", "/parts/7/", "/full", "/broken")}
    assert [(answer.status_code, seen) for answer, seen in found.values()] == [
        (404, [("other", 404)]),
        (404, [("other", 404)]),  # not led to another path
        (500, [("/full", 500)]),
        (500, [("/broken", 500)]),
    ]
    assert found["/full"][0].json() == {"error": "the disk is full", "remedy": "make room"}
    assert found["/broken"][0].json()["error"] == "the server failed"


@pytest.mark.parametrize("name", ["host", "origin", "authorization"])
def test_a_header_that_decides_who_is_served_may_stand_there_once(name: str) -> None:
    """A proxy may have looked at the other one."""

    async def served(_: Request) -> Response:
        return Response(b"")

    async def run(headers: list[tuple[bytes, bytes]]) -> int:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": headers}
        await WebApp([Route("/", "GET", served)])(scope, receive, send)
        return int(sent[0]["status"])

    one = (name.encode(), b"http://localhost")
    assert asyncio.run(run([one])) == 200
    assert asyncio.run(run([one, one])) == 400


# Streams


class Stream:
    """An endless response, and what a client that hangs up after three pieces receives of it."""

    def __init__(self) -> None:
        self.is_closed = False
        self._is_whole = False
        self.sent: list[dict[str, Any]] = []
        self._left = asyncio.Event()

    async def answer(self, _: Request) -> Response:
        return EventStream(self._pieces(), {})

    async def _pieces(self) -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"piece"
                await asyncio.sleep(0)
        finally:
            self.is_closed = True

    async def receive(self) -> dict[str, Any]:
        if not self._is_whole:
            self._is_whole = True
            return {"type": "http.request", "body": b""}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if len(self.sent) == 4:
            self._left.set()

    def run(self) -> None:
        scope = {"type": "http", "method": "GET", "path": "/stream", "headers": []}
        asyncio.run(WebApp([Route("/stream", "GET", self.answer)])(scope, self.receive, self.send))


def test_a_stream_goes_on_until_the_client_hangs_up_and_is_closed_then() -> None:
    stream = Stream()
    stream.run()
    start, *pieces, end = stream.sent
    assert (b"content-type", b"text/event-stream") in start["headers"]
    assert b"content-length" not in dict(start["headers"])
    assert {each["body"] for each in pieces} == {b"piece"}
    assert 3 <= len(pieces) <= 5
    assert not end.get("more_body")
    assert stream.is_closed
