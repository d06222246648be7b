"""Router of HTTP requests: an ASGI application with a table of routes."""

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from broker_config.protocol.errors import EdgeNodeError, explain
from edge.http.access import Access
from edge.http.login import Logins
from edge.http.request import (
    Receive,
    Request,
    RequestError,
    Response,
    Route,
    receiving_in_time,
)

_log = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], Awaitable[None]]
# a route's template, a status, and the seconds until the answer was sent
Observe = Callable[[str, int, float], None]


class Router:
    """Answers each request by its route's handler, for those who may use that;
    whatever happens, there is an answer.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        access: Access | None = None,
        logins: Logins | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Without `access` whoever asks is served; without `logins` nobody can log in."""
        login_routes = logins.routes if logins else ()
        self.routes = (*routes, *login_routes)
        self._access = access
        self._logins = logins
        self._observe = observe
        self._fixed = defaultdict[str, dict[str, Route]](dict)
        patterns = defaultdict[str, dict[str, Route]](dict)
        for route in self.routes:
            table = patterns if "{" in route.template else self._fixed
            table[route.template][route.method] = route
        self._patterns = [
            (re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", template)), by_method)
            for template, by_method in patterns.items()
        ]

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens."""
        start = time.perf_counter()
        request = Request(scope, receive)
        routes = self._match(request)
        try:
            answer = await self._dispatch(routes, request)
        except RequestError as error:
            answer = Response.from_error(error)
        except EdgeNodeError as error:  # of the server's own files
            _log.error("the request for %s failed: %s", request.path, explain(error))
            answer = Response.json({"error": error.what, "remedy": error.remedy}, 500)
        except Exception:
            _log.exception("the request for %s failed", request.path)
            answer = Response.json(
                {"error": "the server failed", "remedy": "see its log, and report it"}, 500
            )
        headers = [(b"content-type", answer.kind), *answer.headers.items()]
        headers += [(b"set-cookie", cookie) for cookie in answer.cookies]
        if answer.stream is None:
            headers.append((b"content-length", b"%d" % len(answer.body)))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if answer.stream is not None and request.method != "HEAD":
            await _send_stream(answer.stream, request, send)
        await send({"type": "http.response.body", "body": answer.body})
        if self._observe:
            template = next((route.template for route in routes.values()), "other")
            self._observe(template, answer.status, time.perf_counter() - start)

    def _match(self, request: Request) -> Mapping[str, Route]:
        """The routes of a request's path by method;
        the path's parameters are stored in the request.
        """
        if found := self._fixed.get(request.path):
            return found
        for pattern, by_method in self._patterns:
            if match := pattern.fullmatch(request.path):
                request.names = match.groupdict()
                return by_method
        return {}

    async def _dispatch(self, routes: Mapping[str, Route], request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        route = routes.get(method)
        request.check_headers()
        if self._access:
            self._access.check(request)
            if route is None or route.needs == "token":
                self._access.check_token(request)
        if not routes:
            raise RequestError(
                "there is nothing at this path", "GET /openapi.json lists all paths", 404
            )
        if route is None:
            head_too = ["HEAD"] if "GET" in routes else []
            allowed = ", ".join([*routes, *head_too])
            raise RequestError(
                "this path takes another method",
                f"use {allowed}",
                405,
                {b"allow": allowed.encode()},
            )
        if route.needs in ("login", "known"):
            await self._identify(request, is_needed=route.needs == "login")
        return await route.handler(request)

    async def _identify(self, request: Request, *, is_needed: bool) -> None:
        user = await self._logins.user(request) if self._logins else None
        if user is None:
            if not is_needed:
                return
            raise RequestError(
                "this needs a login", "log in first; edge-node user NAME lets somebody do so", 401
            )
        request.user = user.name
        request.folders = user.folders


async def _send_stream(stream: AsyncGenerator[bytes], request: Request, send: Send) -> None:
    """Send pieces as they come and the client takes them;
    it is noticed with the next one that it has hung up.
    """
    async with aclosing(stream):
        try:
            async with receiving_in_time():
                async for _ in request.chunks():
                    pass
        except RequestError:  # a response is under way: it ends
            return
        leaving = asyncio.create_task(request.wait_for_disconnect())
        try:
            async for piece in stream:
                if leaving.done():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            leaving.cancel()
