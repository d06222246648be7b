"""Login of people who may change something: a file of password hashes, and sessions in memory."""

import asyncio
import base64
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple, NotRequired, TypedDict
from urllib.parse import urlsplit

import argon2
import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_name
from broker_config.storage import checksums, disk
from edge.http.login_queue import LoginQueue
from edge.http.openapi import JSON, Operation, refused, told
from edge.http.request import RequestError, client_of, json_response, read_json
from edge.http.web_app import Route, User, user_of

PATH = "/login"
LEAST = 8  # characters of a password
# seconds without use after which a session ends: a shift, and what came before it
SESSION = 12 * 3600.0
_SESSIONS = 100  # at once; the one unused for the longest gives way
_PENALTY = 1.0  # seconds that a wrong password holds its queue
_KNOWN = 90 * 24 * 3600  # seconds for which a browser is known after a login
_COOKIE = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in URL-safe Base64
_FRESH = {"cache-control": "no-store"}
_HASHER = argon2.PasswordHasher()  # RFC 9106's second recommendation: 64 MiB


class Accounts:
    """The names and argon2id hashes in a state folder's `accounts.json`,
    which is read whenever it is needed.

    Several processes may change it: each reads, changes and writes it under a lock.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / "accounts.json"
        self._lock = state / "accounts.json.lock"

    def read(self) -> dict[str, str]:
        """Hashes by name; UsageError when the file is not one of ours."""
        try:
            return self._read()
        except (OSError, checksums.DamagedError) as error:
            raise UsageError(
                f"{self.path} holds no logins: {error}",
                f"give it to the owner of {self.path.parent}, restore it from a copy, or "
                f"remove {self.path}: make the logins again then, edge-node user NAME",
            ) from error

    def set(self, name: str, password: str) -> None:
        """Let somebody log in with a password, from now on."""
        check_name(name, "the login's name")
        if len(password) < LEAST:
            raise UsageError(
                f"the password has fewer than {LEAST} characters", "choose a longer one"
            )
        # a hash takes a tenth of a second: it is made before the file is locked
        hashed = _HASHER.hash(password)
        with self._changing() as accounts:
            accounts[name] = hashed

    def remove(self, name: str) -> None:
        """Let somebody log in no more, and end that person's sessions."""
        with self._changing() as accounts:
            if name not in accounts:
                raise UsageError(
                    f"nobody called {name} can log in",
                    f"those who can: {', '.join(sorted(accounts)) or 'none'}",
                )
            del accounts[name]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, str]]:
        """Lock the accounts, and write them as they are left."""
        folder = self.path.parent
        with disk.writing(folder):
            disk.make_private(folder)
        with disk.writing(folder), disk.lock_briefly(self._lock):
            accounts = self.read()
            yield accounts
            checksums.write_record(self.path, accounts)

    def _read(self) -> dict[str, str]:
        try:
            return checksums.read_record(self.path, dict[str, str]) or {}
        except checksums.DamagedError:
            # earlier versions wrote the hashes alone, without a checksum
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                return msgspec.json.decode(disk.read_regular(self.path), type=dict[str, str])
            raise


class Credentials(Struct, frozen=True):
    """What somebody types to log in."""

    name: str
    password: str


class _Session(NamedTuple):
    name: str
    # by state folder; where the accounts have another one, or none, the session is over
    hashes: Mapping[Path, str]
    used_at: float  # by the clock


class LoginState(TypedDict):
    """Who has logged in."""

    name: Annotated[str, Meta(description="Who; empty: nobody")]
    possible: NotRequired[Annotated[bool, Meta(description="Whether there is anybody who could")]]


_WHO = Operation("Who has logged in", {200: told(LoginState, "Who, if anybody")})
_LOG_IN = Operation(
    "Log in",
    {
        200: told(LoginState, "Done: a cookie says so"),
        **refused(
            {
                400: "The body does not fit",
                403: "Name or password is wrong",
                415: "The body is not said to be JSON",
                503: "Too many people are logging in; Retry-After says when to try again",
            }
        ),
    },
    body={JSON: Credentials},
)
_LOG_OUT = Operation("Log out", {200: told(LoginState, "Nobody has logged in any more")})


class Logins:
    """Sessions of those who have logged in, by a random cookie that scripts and other sites'
    requests never have.
    """

    def __init__(
        self,
        *accounts: Accounts,
        clock: Callable[[], float] = time.monotonic,
        penalty: float = _PENALTY,
    ) -> None:
        """A login is good for those state folders alone in whose accounts it stands."""
        self._accounts = accounts
        self._clock = clock
        self._penalty = penalty
        self._sessions = OrderedDict[str, _Session]()  # by cookie, the one used last at the end
        self._strangers = LoginQueue()  # by address
        self._acquaintances = LoginQueue()  # by name: browsers in which it has logged in before

    @property
    def routes(self) -> list[Route]:
        """GET says who has logged in, POST logs in, DELETE logs out."""
        return [
            Route(PATH, "GET", self._who, "known", _WHO),
            Route(PATH, "POST", self._log_in, "nothing", _LOG_IN),
            Route(PATH, "DELETE", self._log_out, "nothing", _LOG_OUT),
        ]

    async def user(self, request: Request) -> User | None:
        """Return who has logged in; None if nobody has."""
        cookie = _read_cookie(request, _session_name(request))
        session = self._sessions.get(cookie)
        if session is None:
            return None
        hashes = await asyncio.to_thread(self._hashes, session.name)
        folders = {folder for folder, known in session.hashes.items() if hashes[folder] == known}
        now = self._clock()
        if now - session.used_at > SESSION or not folders:
            self._sessions.pop(cookie, None)
            return None
        if cookie in self._sessions:  # nobody has logged out meanwhile
            self._sessions[cookie] = session._replace(used_at=now)
            self._sessions.move_to_end(cookie)
        return User(session.name, frozenset(folders))

    async def _who(self, request: Request) -> Response:
        is_possible = await asyncio.to_thread(lambda: any(each.read() for each in self._accounts))
        return json_response({"name": user_of(request).name, "possible": is_possible})

    async def _log_in(self, request: Request) -> Response:
        given = await read_json(request, Credentials)
        # A browser in which this person has logged in before does not wait for strangers, who may
        # guess all the time, from many addresses or through the same reverse proxy.
        if await self._is_known(given.name, request):
            slot = self._acquaintances.slot(given.name)
        else:
            slot = self._strangers.slot(client_of(request))
        async with slot:  # one at a time: a hash takes 64 MiB and a core
            found = await asyncio.to_thread(self._verify, given)
            if not found:
                await asyncio.sleep(self._penalty)
        if not found:
            raise RequestError(
                "name or password is wrong",
                "try again; edge-node user NAME sets a new password",
                403,
            )
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = _Session(given.name, found, self._clock())
        while len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        response = json_response({"name": given.name}, headers=_FRESH)
        _set_cookie(request, response, _session_name(request), cookie)
        proof = _proof(next(iter(found.values())))
        _set_cookie(request, response, _known_name(request), proof, _KNOWN)
        return response

    async def _log_out(self, request: Request) -> Response:
        name = _session_name(request)
        self._sessions.pop(_read_cookie(request, name), None)
        response = json_response({"name": ""}, headers=_FRESH)
        _set_cookie(request, response, name, "", 0)
        return response

    def _hashes(self, name: str) -> dict[Path, str | None]:
        """Return a person's hash in each state folder."""
        return {each.path.parent: each.read().get(name) for each in self._accounts}

    def _verify(self, given: Credentials) -> dict[Path, str]:
        """Return the hashes that the password has, by state folder; none if it is wrong, which
        takes as long where there is no such name.
        """
        found = {}
        for folder, known in self._hashes(given.name).items():
            try:
                _HASHER.verify(known or _nobodys_hash(), given.password)
            except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
                continue
            if known:
                found[folder] = known
        return found

    async def _is_known(self, name: str, request: Request) -> bool:
        """Return whether a person has logged in in this browser before."""
        given = _read_cookie(request, _known_name(request))
        if not given:
            return False
        hashes = await asyncio.to_thread(self._hashes, name)
        return any(hmac.compare_digest(given, _proof(each)) for each in hashes.values() if each)


@cache
def _nobodys_hash() -> str:
    return _HASHER.hash(secrets.token_hex())


def _proof(password_hash: str) -> str:
    """Return what a browser is known by: it follows from the hash, which nobody else has, so
    nothing needs to be kept, and a new password ends it.
    """
    digest = hmac.digest(password_hash.encode(), b"edge-node: a known browser", "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _session_name(request: Request) -> str:
    """Return the name of a session's cookie. A browser sends a host's cookies to all of its
    ports, where other lines may listen: the port makes it ours.
    """
    try:
        port = urlsplit("//" + request.headers.get("host", "")).port
    except ValueError:
        port = None
    return f"edge-node-{port or 'default'}"


def _known_name(request: Request) -> str:
    return f"{_session_name(request)}-known"


def _read_cookie(request: Request, name: str) -> str:
    """Return a cookie's value; empty if the request has none that could be one of ours.

    The standard library's parser, and those of web frameworks, unquote each value in quadratic
    time: one header could stop the event loop for 20 seconds. Ours are never quoted.
    """
    for pair in request.headers.get("cookie", "").split(";"):
        key, _, value = pair.strip(" \t").partition("=")
        if key == name and _COOKIE.fullmatch(value):
            return value
    return ""


def _set_cookie(
    request: Request, response: Response, name: str, value: str, seconds: int | None = None
) -> None:
    """Have the browser keep a cookie; without `seconds` until it is closed."""
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        # a reverse proxy speaks TLS with the browser
        secure=request.headers.get("origin", "").startswith("https:"),
        httponly=True,
        samesite="strict",
    )
