"""Each request gets an answer: its route's, or an error with a remedy."""

import asyncio

import httpx
import pytest

from broker_config.protocol.errors import EdgeNodeError
from edge.http.request import Request, Response, Route
from edge.http.router import Router


def ask(method: str, path: str) -> tuple[httpx.Response, list[tuple[str, int]]]:
    """An answer, and what was observed."""
    observed = []

    async def named(request: Request) -> Response:
        return Response.json([request.method, request.names])

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
        app = Router(routes, observe=lambda path, status, _: observed.append((path, status)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path)

    return asyncio.run(run()), observed


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_path_may_have_several_methods_and_gives_its_handler_what_stands_in_it(method: str) -> None:
    answer, observed = ask(method, "/parts/7")
    assert answer.json() == [method, {"id": "7"}]
    assert observed == [("/parts/{id}", 200)]


def test_another_method_is_told_which_ones_there_are() -> None:
    answer, _ = ask("POST", "/parts/7")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, DELETE, HEAD")


def test_an_unknown_path_and_failures_are_answered_and_observed() -> None:
    found = {path: ask("GET", path) for path in ("/parts/7/8", "/full", "/broken")}
    assert [(answer.status_code, seen) for answer, seen in found.values()] == [
        (404, [("other", 404)]),
        (500, [("/full", 500)]),
        (500, [("/broken", 500)]),
    ]
    assert found["/full"][0].json() == {"error": "the disk is full", "remedy": "make room"}
    assert found["/broken"][0].json()["error"] == "the server failed"
