"""Login of people who may change something: a file of password hashes, and sessions in memory."""

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import argon2
import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_name
from broker_config.storage import disk
from edge.http.request import Request, RequestError, Response, Route

PATH = "/login"
LEAST = 8  # characters of a password
# seconds without use after which a session ends: a shift, and what came before it
SESSION = 12 * 3600.0
_SESSIONS = 100  # at once; the one unused for the longest gives way
_WAITING = 4  # attempts at once
_PENALTY = 1.0  # seconds that a wrong password costs everybody who logs in
_COOKIE = re.compile(r"[A-Za-z0-9_-]{43}")  # a session's: what `secrets.token_urlsafe` makes
_HASHER = argon2.PasswordHasher()  # RFC 9106's second recommendation: 64 MiB


class Accounts:
    """The names and argon2id hashes in a state folder's `accounts.json`,
    which is read whenever it is needed.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / "accounts.json"

    def read(self) -> dict[str, str]:
        """Hashes by name; UsageError when the file is not one of ours."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(
                f"{self.path} holds no logins: {error}",
                "remove it, and make the logins again: edge-node user NAME",
            ) from error

    def set(self, name: str, password: str) -> None:
        """Let somebody log in with a password, from now on."""
        check_name(name, "the login's name")
        if len(password) < LEAST:
            raise UsageError(
                f"the password has fewer than {LEAST} characters", "choose a longer one"
            )
        self._write(self.read() | {name: _HASHER.hash(password)})

    def remove(self, name: str) -> None:
        """Let somebody log in no more, and end that person's sessions."""
        found = self.read()
        if name not in found:
            raise UsageError(
                f"nobody called {name} can log in",
                f"those who can: {', '.join(sorted(found)) or 'none'}",
            )
        del found[name]
        self._write(found)

    def _write(self, accounts: dict[str, str]) -> None:
        with disk.writing(self.path.parent):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk.replace_bytes(
                self.path, msgspec.json.format(msgspec.json.encode(accounts)), mode=0o600
            )


class Credentials(Struct, frozen=True):
    """What somebody types to log in."""

    name: str
    password: str


class _Session(NamedTuple):
    name: str
    password_hash: str  # with another one, or none, the session is over
    used_at: float  # by the clock


class Logins:
    """Sessions of those who have logged in, by a random cookie that scripts and other sites'
    requests never have.
    """

    def __init__(
        self,
        accounts: Accounts,
        *,
        clock: Callable[[], float] = time.monotonic,
        penalty: float = _PENALTY,
    ) -> None:
        self._accounts = accounts
        self._clock = clock
        self._penalty = penalty
        self._sessions = OrderedDict[str, _Session]()  # by cookie, the one used last at the end
        self._checking = asyncio.Lock()
        self._waiting = 0

    @property
    def routes(self) -> Iterator[Route]:
        """GET says who has logged in, POST logs in, DELETE logs out."""
        yield Route(PATH, "GET", self._who, "nothing")
        yield Route(PATH, "POST", self._log_in, "nothing")
        yield Route(PATH, "DELETE", self._log_out, "nothing")

    def user(self, request: Request) -> str:
        """The name of who has logged in; empty if nobody has."""
        cookie = _read_cookie(request)
        session = self._sessions.get(cookie)
        if session is None:
            return ""
        now = self._clock()
        if (
            now - session.used_at > SESSION
            or self._accounts.read().get(session.name) != session.password_hash
        ):
            del self._sessions[cookie]
            return ""
        self._sessions[cookie] = session._replace(used_at=now)
        self._sessions.move_to_end(cookie)
        return session.name

    async def _who(self, request: Request) -> Response:
        return Response.json({"name": self.user(request), "possible": bool(self._accounts.read())})

    async def _log_in(self, request: Request) -> Response:
        given = await request.json(Credentials)
        if self._waiting >= _WAITING:
            raise RequestError(
                "too many people are logging in",
                "try again in a moment",
                503,
                {b"retry-after": b"5"},
            )
        self._waiting += 1
        try:
            async with self._checking:  # one at a time: a hash takes 64 MiB and a core
                found = await asyncio.to_thread(self._verify, given)
                if found is None:
                    await asyncio.sleep(self._penalty)
        finally:
            self._waiting -= 1
        if found is None:
            raise RequestError(
                "name or password is wrong",
                "try again; edge-node user NAME sets a new password",
                403,
            )
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = _Session(given.name, found, self._clock())
        while len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return Response.json({"name": given.name}, headers=_set_cookie(request, cookie))

    async def _log_out(self, request: Request) -> Response:
        self._sessions.pop(_read_cookie(request), None)
        return Response.json({"name": ""}, headers=_set_cookie(request, ""))

    def _verify(self, given: Credentials) -> str | None:
        """The hash that the password has; None if it is wrong,
        which takes as long where there is no such name.
        """
        known = self._accounts.read().get(given.name)
        try:
            _HASHER.verify(known or _nobodys_hash(), given.password)
        except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
            return None
        return known


@cache
def _nobodys_hash() -> str:
    return _HASHER.hash(secrets.token_hex())


def _cookie_name(request: Request) -> str:
    """A browser sends a host's cookies to all of its ports, where other lines may listen:
    the port makes it ours.
    """
    try:
        port = urlsplit("//" + request.headers.get(b"host", b"").decode("latin-1")).port
    except ValueError:
        port = None
    return f"edge-node-{port or 'default'}"


def _read_cookie(request: Request) -> str:
    """Return the session's cookie; empty if the request has none that could be one of ours.

    The standard library's parser, and those of web frameworks, unquote each value in quadratic
    time: one header could stop the event loop for 20 seconds. Ours are never quoted.
    """
    name = _cookie_name(request)
    for pair in request.headers.get(b"cookie", b"").decode("latin-1").split(";"):
        key, _, value = pair.strip(" \t").partition("=")
        if key == name and _COOKIE.fullmatch(value):
            return value
    return ""


def _set_cookie(request: Request, value: str) -> dict[bytes, bytes]:
    parts = [f"{_cookie_name(request)}={value}", "Path=/", "HttpOnly", "SameSite=Strict"]
    # a reverse proxy speaks TLS with the browser
    if request.headers.get(b"origin", b"").startswith(b"https:"):
        parts.append("Secure")
    if not value:
        parts.append("Max-Age=0")
    return {b"set-cookie": "; ".join(parts).encode(), b"cache-control": b"no-store"}
