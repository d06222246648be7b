"""Web application: Starlette's routes, behind middleware of our own.

Starlette finds a request's handler; what it lacks stands here. Each request gets an answer in
JSON, whatever happens. A browser is let in under a known name alone. Each route says what it needs:
the token of programs, a person's login, or nothing.

Starlette's `request.cookies` must not be used: it unquotes in quadratic time (see `login.py`).
"""

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker_config.protocol.errors import EdgeNodeError, explain
from edge.http.access import Access
from edge.http.openapi import Described, Operation, refused
from edge.http.request import RequestError, error_response, json_response

_log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
# "known": nothing, but whoever has logged in is told from others
Needs = Literal["token", "login", "known", "nothing"]
# a route's path, a status, and the seconds until the answer was sent
Observe = Callable[[str, int, float], None]

# Headers that decide who is served, and how the body is read: of two, a proxy may have looked at
# the other one.
_ONCE = (b"host", b"origin", b"authorization", b"content-type", b"content-encoding")


class User(NamedTuple):
    """Somebody who has logged in, or has not."""

    name: str = ""
    folders: frozenset[Path] = frozenset()  # state folders in whose accounts the login stands


class Sessions(Protocol):
    """What knows who has logged in."""

    @property
    def routes(self) -> "Sequence[Route]":
        """How people log in."""
        ...

    async def user(self, request: Request) -> User | None:
        """Return who has logged in; None if nobody has."""
        ...


class Route(routing.Route):
    """A path, a method and their handler, with what a request needs to come to it."""

    def __init__(
        self,
        path: str,
        method: str,
        handler: Handler,
        needs: Needs = "token",
        about: Operation | None = None,
    ) -> None:
        """`about` is for the OpenAPI document."""
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.needs = needs
        self._about = about

    @property
    def described(self) -> Described | None:
        """What the OpenAPI document says of it, if anything."""
        if self._about is None:
            return None
        answers = {**self._about.answers}
        if self.needs == "login":
            answers |= refused({401: "Nobody has logged in"})
        return Described(self.path, self.method, self._about._replace(answers=answers))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that has what it needs; RequestError when it has not."""
        assert self.methods
        if scope["method"] in self.methods:
            app: WebApp = scope["app"]
            await app.admit(Request(scope), self.needs)
        await super().handle(scope, receive, send)


class WebApp(Starlette):
    """The application: routes, and who may use them."""

    def __init__(
        self,
        routes: Sequence[Route],
        access: Access | None = None,
        logins: Sessions | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Without `access` whoever asks is served; without `logins` nobody can log in."""
        login_routes = logins.routes if logins else ()
        super().__init__(
            routes=[*routes, *login_routes],
            middleware=[
                Middleware(_Answers, observe=observe),
                Middleware(_AccessCheck, access=access),
            ],
            exception_handlers={HTTPException: self._refuse},
        )
        self.router.redirect_slashes = False
        self._access = access
        self._logins = logins

    async def admit(self, request: Request, needs: Needs) -> None:
        """Note who asks; RequestError when that needs a token or a login, and there is none."""
        if needs == "token" and self._access:
            self._access.check_token(request)
        user = None
        if needs in ("login", "known") and self._logins:
            user = await self._logins.user(request)
        if needs == "login" and user is None:
            raise RequestError(
                "this needs a login", "log in first; edge-node user NAME lets somebody do so", 401
            )
        request.scope["user"] = user or User()

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Say what there is instead of a path or a method that there is not."""
        if isinstance(error, HTTPException) and error.status_code == 405:
            methods = [
                route.method
                for route in self.routes
                if isinstance(route, Route) and route.path_regex.match(request.scope["path"])
            ]
            head_too = ["HEAD"] if "GET" in methods else []
            allowed = ", ".join([*methods, *head_too])
            raise RequestError(
                "this path takes another method", f"use {allowed}", 405, {"allow": allowed}
            )
        raise RequestError(
            "there is nothing at this path", "GET /openapi.json lists all paths", 404
        )


class EventStream(StreamingResponse):
    """Server-sent events, as long as the client listens."""

    body_iterator: AsyncGenerator[bytes]

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(events, headers={"content-type": "text/event-stream", **headers})
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events, and end the response also when it is the client that ends it."""
        await super().__call__(scope, receive, send)
        if not self._is_whole:
            await send({"type": "http.response.body", "body": b""})

    async def stream_response(self, send: Send) -> None:
        """Send events as they come; the generator ends with the connection, not some time later."""
        async with aclosing(self.body_iterator):
            await super().stream_response(send)
        self._is_whole = True


class _Answers:
    """Answers each request, whatever happens, and observes the answer."""

    def __init__(self, app: ASGIApp, observe: Observe | None) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        answer: Response | None = None
        try:
            await self._app(scope, receive, send_and_note)
        except RequestError as error:
            answer = error_response(error)
        except EdgeNodeError as error:  # of the server's own files
            _log.error("the request for %s failed: %s", scope["path"], explain(error))
            answer = json_response({"error": error.what, "remedy": error.remedy}, 500)
        except Exception:
            _log.exception("the request for %s failed", scope["path"])
            answer = json_response(
                {"error": "the server failed", "remedy": "see its log, and report it"}, 500
            )
        if answer and not status:
            await answer(scope, receive, send_and_note)
        if self._observe:
            self._observe(_template(scope), status, time.perf_counter() - start)


def _template(scope: Scope) -> str:
    """Return a request's path as routes have it, or `other`."""
    if "route" not in scope:  # it was refused before
        for route in scope["app"].routes:
            if route.path_regex.match(scope["path"]):
                return str(route.path)
        return "other"
    return str(scope["route"].path)


class _AccessCheck:
    """Refuses what comes under a name or from a page that is not ours."""

    def __init__(self, app: ASGIApp, access: Access | None) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope["headers"]]
        for name in _ONCE:
            if names.count(name) > 1:
                raise RequestError(
                    f"the request has more than one header {name.decode().title()}",
                    "send it once",
                )
        if self._access:
            self._access.check(Request(scope))
        await self._app(scope, receive, send)


def user_of(request: Request) -> User:
    """Return who asks, on a route that needs a login or wants to know."""
    found: Any = request.scope["user"]
    assert isinstance(found, User)
    return found
