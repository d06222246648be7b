"""Console of federations: their state folders, followed and served as a page with what it asks for.

It reads files that a coordinator has written, in a process of its own: none of its failures, and no
number of people who look at it, reach a federation. `python -m trainer.console.console STATE HOST
FD` serves on an open socket until standard input closes.
"""

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import uvloop
from starlette.requests import Request
from starlette.responses import Response

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.registry import Registry
from broker_config.storage import disk
from edge.http.access import Access
from edge.http.login import Accounts, Logins
from edge.http.request import RequestError, client_of, json_response, query, read_json
from edge.http.server import Server
from edge.http.web_app import EventStream, Route, WebApp, user_of
from edge.page.page_files import page_routes
from trainer.console.console_process import PATH
from trainer.console.federation_folder import FederationFolder
from trainer.console.run_history import RunHistory
from trainer.federation.server import operator_actions
from trainer.federation.server.operator_actions import Kind

FILES = (
    "console.css",
    "console.js",
    "console_charts.js",
    "console_elements.js",
    "console_strings.json",
    "console_values.js",
    "uPlot.iife.min.js",
    "uPlot.min.css",
)
_EVERY = 0.25  # seconds between two looks at the folders, at least
_HEARTBEAT = 5.0  # seconds after which a stream says that it is still there
MOST_STREAMS = 64
_VERSION = re.compile(r"[0-9]{1,18}")  # more digits than a version ever has take long, or fail
_FRESH = {"cache-control": "no-store"}

_log = logging.getLogger(__name__)


class Wanted(msgspec.Struct, frozen=True):
    """What somebody who has logged in wants of a run."""

    what: Kind
    node: str | None = None


@dataclass
class _Stream:
    """Somebody who looks."""

    user: str  # empty: not logged in
    client: str
    is_over: bool = False  # it gives way to another


class StateFolder(Protocol):
    """A state folder that is followed."""

    FILE: ClassVar[str]  # which folders of this kind have, and no others
    folder: Path
    runs: dict[str, RunHistory]  # the newest last

    def __init__(self, folder: Path) -> None:
        """UsageError if the folder is of another kind; EdgeNodeError if it is damaged."""

    def refresh(self) -> bool:
        """Read what is new; whether there was anything.

        EdgeNodeError or OSError if it cannot be read.
        """
        ...


_FOLDERS: Registry[type[StateFolder]] = Registry("console_folders")


class Console:
    """The page, and what it asks for."""

    def __init__(
        self, folders: Sequence[StateFolder], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folders = folders
        self._clock = clock
        self._looked_at = float("-inf")  # by the clock: the folders
        self._lock = asyncio.Lock()
        self._streams: list[_Stream] = []  # the oldest first
        self.closing = False  # streams end

    @property
    def routes(self) -> Iterator[Route]:
        """Paths below PATH, and the way there."""
        yield from page_routes(PATH, "console.html", FILES, Path(__file__).parent)
        yield Route(PATH + "events", "GET", self._events, "known")
        yield Route(PATH + "runs/{id}", "GET", self._run)
        yield Route("/", "GET", _redirect)
        yield Route(PATH + "runs/{id}/actions", "POST", self._act, "login")

    async def _events(self, request: Request) -> Response:
        """Server-sent events: where all runs stand, now and whenever that has changed."""
        new = _Stream(user_of(request).name, client_of(request))
        if len(self._streams) >= MOST_STREAMS and self._find_yielding(new) is None:
            raise RequestError(
                f"{len(self._streams)} people look at this console already",
                "log in, or try again later",
                503,
            )
        if request.method == "HEAD":
            return Response(headers={"content-type": "text/event-stream", **_FRESH})
        return EventStream(self._stream_to(new), _FRESH)

    def _find_yielding(self, new: _Stream) -> _Stream | None:
        """Return the stream that ends for a new one: the oldest of the client that has the most
        without a login; None if the new one has no better claim.
        """
        strangers = [each for each in self._streams if not each.user]
        if not strangers:
            return None
        counts = Counter(each.client for each in strangers)
        most = max(counts.values())
        if not new.user and counts[new.client] >= most - 1:
            return None
        return next(each for each in strangers if counts[each.client] == most)

    async def _stream_to(self, new: _Stream) -> AsyncGenerator[bytes]:
        sent = b""
        said_at = self._clock()
        if len(self._streams) >= MOST_STREAMS and (yielding := self._find_yielding(new)):
            yielding.is_over = True
            self._streams.remove(yielding)
        self._streams.append(new)
        try:
            while not (self.closing or new.is_over):
                async with self._lock:
                    await self._refresh()
                    state = await asyncio.to_thread(self._encode_overview)
                if state != sent:
                    yield b"data: " + state + b"\n\n"
                    sent = state
                    said_at = self._clock()
                elif self._clock() - said_at > _HEARTBEAT:
                    yield b"event: alive\ndata: 1\n\n"  # a comment would not reach the page
                    said_at = self._clock()
                await asyncio.sleep(_EVERY)
        except EdgeNodeError as error:  # the page asks again
            _log.error("the stream of events ends: %s", error)
        finally:
            if new in self._streams:
                self._streams.remove(new)

    def _encode_overview(self) -> bytes:
        return msgspec.json.encode(self._overview())

    def _overview(self) -> dict[str, Any]:
        """All runs, the newest last; the newest of a folder is `running` while a process uses
        that.
        """
        runs = []
        for each in self._folders:
            is_used = disk.is_locked(each.folder)
            newest = next(reversed(each.runs), None)
            for id_, run in each.runs.items():
                runs.append(
                    run.overview()
                    | {"folder": each.folder.name, "running": is_used and id_ == newest}
                )
        return {"runs": sorted(runs, key=lambda run: run["begun"])}

    async def _run(self, request: Request) -> Response:
        """All of a run, or with `?since=` what has changed after that version."""
        since = query(request, "since", "0")
        async with self._lock:
            await self._refresh()
            _, run = self._find(request)
            since_or_zero = int(since) if _VERSION.fullmatch(since) else 0
            # with the lock: nothing changes meanwhile
            content = await asyncio.to_thread(lambda: msgspec.json.encode(run.since(since_or_zero)))
        return Response(content, headers=_FRESH, media_type="application/json")

    async def _act(self, request: Request) -> Response:
        """Have the coordinator pause, resume or abort its run, or drop a node."""
        wanted = await read_json(request, Wanted)
        async with self._lock:
            await self._refresh()
            folder, run = self._find(request)
        user = user_of(request)
        if folder.folder not in user.folders:
            raise RequestError(
                f"{user.name} may not act on runs of {folder.folder.name}",
                f"log in as somebody who may: edge-node user NAME --state {folder.folder.name}",
                403,
            )
        if run.about.kind != "federation":
            raise RequestError(
                f"runs of the kind {run.about.kind} are not operated from here",
                "stop the processes that take part",
                409,
            )
        try:
            await asyncio.to_thread(
                operator_actions.request,
                folder.folder,
                wanted.what,
                user.name,
                wanted.node,
                run.about.id,
            )
        except UsageError as error:
            raise RequestError(error.what, error.remedy, 409) from error
        return json_response({}, 202)

    def _find(self, request: Request) -> tuple[StateFolder, RunHistory]:
        for each in self._folders:
            if run := each.runs.get(request.path_params["id"]):
                return each, run
        raise RequestError(
            "there is no such run here", "choose one of those that the page lists", 404
        )

    async def _refresh(self) -> None:
        """Look at the folders again, if the last time was not just now."""
        if self._clock() - self._looked_at < _EVERY:
            return
        for each in self._folders:
            try:
                await asyncio.to_thread(each.refresh)
            except OSError as error:
                raise EdgeNodeError(
                    f"{each.folder} cannot be read: {error.strerror}",
                    "let this user read it, and reload the page",
                ) from error
        self._looked_at = self._clock()


async def _redirect(_request: Request) -> Response:
    return Response(b"", 303, {"location": PATH.removeprefix("/")})


def open_folder(folder: Path) -> StateFolder:
    """A state folder of a coordinator, of whichever kind of federation.

    UsageError if it is none; EdgeNodeError if it cannot be read.
    """
    found = (kind for kind in _FOLDERS.values() if (folder / kind.FILE).exists())
    # without any, the folder of a coordinator says that it is none
    kind: type[StateFolder] = next(found, FederationFolder)
    opened = kind(folder)
    opened.refresh()
    return opened


def serve(folders: Sequence[StateFolder], listener: socket.socket, access: Access) -> None:
    """Serve the console until SIGTERM or SIGINT; a line `console URL` on standard error says where.

    Each folder says who can log in and act on its runs.
    """
    logins = Logins(*(Accounts(each.folder) for each in folders))
    uvloop.run(_serve(Console(folders), listener, access, logins))


async def _serve(console: Console, listener: socket.socket, access: Access, logins: Logins) -> None:
    host, port = listener.getsockname()[:2]
    host_text = f"[{host}]" if ":" in host else host
    url = f"http://{host_text}:{port}{PATH}"
    server = Server(
        WebApp([*console.routes], access, logins),
        lambda: print(f"console {url}", file=sys.stderr, flush=True),
    )

    def stop() -> None:
        server.should_exit = console.closing = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await server.serve(sockets=[listener])


def _terminate_when_input_closes() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock must be free when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_beside(state: Path, host: str, listener: socket.socket) -> None:
    threading.Thread(target=_terminate_when_input_closes, daemon=True).start()
    serve([open_folder(state)], listener, Access.of(host, (), ""))


if __name__ == "__main__":
    _serve_beside(Path(sys.argv[1]), sys.argv[2], socket.socket(fileno=int(sys.argv[3])))
