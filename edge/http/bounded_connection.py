"""One HTTP connection within bounds: uvicorn's protocol, behind a guard against slow,
greedy and talkative clients.

uvicorn bounds neither the number of connections, nor a request's head in size or time, nor the time
of a client that does not read its response. The guard sees what asyncio and ASGI show of a
connection, and nothing of uvicorn's state.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Literal

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.http.client_group import client_group

MAX_CONNECTIONS = 256
MAX_PER_CLIENT = 192  # of one address: others find room whatever it does
MAX_HEAD = 1 << 16  # bytes of a request besides its body
MAX_PIPELINED = 8  # requests that wait for the response to one before them
KEEP_ALIVE = 300  # seconds between the images of a slow line, on one connection
HEAD_TIME = 10.0  # seconds in which a request's head must arrive, from its first byte on
LINGER = 5.0  # seconds for the rest of a body that was refused
SEND_TIME = 30.0  # seconds in which a client must read something
_TOO_MANY = ("too many connections", "close some, or keep one for all images")
_CHUNK_FRAME = 16  # bytes around a chunk of a body, at most

Phase = Literal["idle", "head", "body", "busy", "refused body"]
# phases in which the application does nothing for a client, in the order in which they give way
_GIVE_WAY: tuple[Phase, ...] = ("idle", "refused body", "head", "body")


class Connections:
    """All open connections; an ASGI application that reports to each of them how far its
    requests are.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: dict[tuple[str, int], Connection] = {}  # by the client's address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        client: tuple[str, int] | None = scope["client"]  # None: it had ended before uvicorn saw it
        if client and (connection := self._open.get(client)):
            await connection.serve(self._app, scope, receive, send)
        else:  # it has ended since the request came
            await self._app(scope, receive, send)

    def admit(self, client: tuple[str, int], connection: "Connection") -> bool:
        """Add a connection, if need be in place of another; False if none gives way.

        Whoever has its share takes from itself.
        """
        group = connection.group
        own = [each for each in self._open.items() if each[1].group == group]
        if len(own) >= MAX_PER_CLIENT:
            if not self._displace(own):
                return False
        elif len(self._open) >= MAX_CONNECTIONS and not self._displace([*self._open.items()]):
            return False
        self._open[client] = connection
        return True

    def remove(self, client: tuple[str, int], connection: "Connection") -> None:
        """Remove a connection that has ended."""
        if self._open.get(client) is connection:
            del self._open[client]

    def _displace(self, among: "Sequence[tuple[tuple[str, int], Connection]]") -> bool:
        """End a connection for which the application does nothing; False if there is none.

        The client that has the most of these loses one: first of those that are idle, then of
        those whose request has been arriving the longest. Half a request costs its sender a
        packet, so a few packets must not keep everybody else out.
        """
        found = [each for each in among if each[1].phase in _GIVE_WAY]
        if not found:
            return False
        counts = Counter(connection.group for _, connection in found)
        most = max(counts.values())
        candidates = [each for each in found if counts[each[1].group] == most]
        client, chosen = min(candidates, key=lambda each: each[1].precedence)
        del self._open[client]
        chosen.give_way()
        return True


class Connection(asyncio.Protocol):
    """A connection: it passes everything on to uvicorn's protocol, unless that exceeds a bound."""

    def __init__(self, *, config: uvicorn.Config, **arguments: Any) -> None:
        self.group = ""  # what counts as this client
        self.phase: Phase = "idle"
        self.phase_began = 0.0  # by the event loop's clock
        self._http = _Protocol(config=config, **arguments)
        # any application, for uvicorn
        self._connections: Connections = config.app  # type: ignore[assignment]
        self._progress = _Progress()
        self._answered = 0  # requests
        self._has_left = False  # the client sends nothing more, which is how hanging up looks too
        self._is_admitted = False
        self._requests: set[asyncio.Event] = set()  # each set when nobody waits for its response
        self._timer: asyncio.TimerHandle | None = None  # of the phase
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if there is room for it."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        peer = transport.get_extra_info("peername")
        if peer is None:  # it is gone already
            transport.abort()
            return
        self._client = (str(peer[0]), int(peer[1]))
        self.group = client_group(self._client[0])
        self._is_admitted = self._connections.admit(self._client, self)
        if self._is_admitted:
            self._http.connection_made(_LenientTransport(transport))  # type: ignore[arg-type]
            self._enter("idle", anew=True)
        else:
            self._refuse(503, *_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, and let the requests in hand know that nobody waits for their
        responses.
        """
        self._cancel_timer()
        self._cancel_send_timer()
        self._leave()
        if self._is_admitted:
            self._connections.remove(self._client, self)
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what is HTTP and within bounds."""
        if self._transport.is_closing():
            return
        progress = self._progress
        try:
            progress.feed(data)
        except httptools.HttpParserError:
            self._refuse(
                400,
                "this is not a whole HTTP request",
                "see /openapi.json for what the line understands",
            )
            return
        if progress.excess > MAX_HEAD:
            self._refuse(
                431, f"the request has more than {MAX_HEAD >> 10} KiB besides its body", "send less"
            )
        elif progress.asked - self._answered > MAX_PIPELINED + 1:
            self._transport.close()
        else:
            self._http.data_received(data)
            self._update_phase()

    def eof_received(self) -> bool:
        """Answer what a client that sends nothing more has asked;
        True while there is something to answer.
        """
        if self._progress.is_in_body or self._progress.asked == self._answered:
            return False
        self._leave()  # most have hung up: what takes long need not go on
        return True

    def pause_writing(self) -> None:
        """Give a client that does not read a limited time."""
        self._http.pause_writing()
        self._send_timer = self._loop.call_later(SEND_TIME, self._transport.abort)

    def resume_writing(self) -> None:
        """Go on with a client that reads again."""
        self._http.resume_writing()
        self._cancel_send_timer()

    @property
    def precedence(self) -> tuple[int, float]:
        """The less, the sooner it gives way to a new connection."""
        return _GIVE_WAY.index(self.phase), self.phase_began

    def give_way(self) -> None:
        """Close the connection to make room; answer 503 first if the request's head is still
        arriving."""
        if self.phase == "head":
            self._refuse(503, *_TOO_MANY)
        else:
            self._transport.close()

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request of this connection."""
        is_whole = False
        ended = asyncio.Event()
        if self._has_left:
            ended.set()

        async def receive_or_end() -> Message:
            nonlocal is_whole
            if not is_whole:
                message = await receive()
                is_whole = not message.get("more_body", False)
                return message
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send_and_count(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._end_request(ended)

        self._requests.add(ended)
        try:
            await app(scope, receive_or_end, send_and_count)
        finally:
            self._end_request(ended)

    def _end_request(self, ended: asyncio.Event) -> None:
        if ended in self._requests:
            self._requests.remove(ended)
            self._answered += 1
            ended.set()
            self._update_phase()

    def _leave(self) -> None:
        self._has_left = True
        for ended in self._requests:
            ended.set()

    def _update_phase(self) -> None:
        """Start or stop timers according to what the client and the application have done."""
        if self._transport.is_closing():
            return
        if self._progress.asked > self._answered:
            is_arriving = self._progress.is_in_body and self._progress.asked == self._answered + 1
            phase: Phase = "body" if is_arriving else "busy"
            self._enter(phase)
        elif self._has_left:
            self._transport.close()
        elif self._progress.is_in_body:
            self._enter("refused body")
        elif self._progress.is_in_head:
            self._enter("head")
        else:
            self._enter("idle", anew=True)

    def _enter(self, phase: Phase, *, anew: bool = False) -> None:
        if phase == self.phase and not anew:
            return
        self._cancel_timer()
        self.phase = phase
        self.phase_began = self._loop.time()
        if phase == "idle":
            self._timer = self._loop.call_later(KEEP_ALIVE, self._transport.close)
        elif phase in ("head", "refused body"):
            seconds = HEAD_TIME if phase == "head" else LINGER
            error = (408, "the request did not arrive in time", "check the network, or send less")
            self._timer = self._loop.call_later(seconds, self._refuse, *error)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _cancel_send_timer(self) -> None:
        if self._send_timer:
            self._send_timer.cancel()
            self._send_timer = None

    def _refuse(self, status: int, what: str, remedy: str) -> None:
        """End the connection, with a response unless one is under way or was given."""
        if self._transport.is_closing():
            return
        if self._answered >= self._progress.asked and not self._progress.is_in_body:
            body = msgspec.json.encode({"error": what, "remedy": remedy})
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode() + body)
        self._transport.close()


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, without what follows a chunked body: it adds such trailers to the
    headers, where a second Host or Authorization would count.
    """

    def on_headers_complete(self) -> None:
        """Leave the request its headers; what else comes is collected where nobody looks."""
        super().on_headers_complete()
        self.headers = []


class _LenientTransport:
    """A transport that takes no offence at what is written after its end,
    as asyncio's do and uvloop's does not.

    uvicorn writes then, where a client has sent several requests at once and is gone before the
    first response.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, while somebody may read it."""
        if not self._transport.is_closing():
            self._transport.write(data)


class _Progress:
    """What a client has sent: the requests so far,
    and the part of the present one that has arrived.
    """

    def __init__(self) -> None:
        self.begun = 0  # requests
        self.asked = 0  # requests whose head is complete
        self.excess = 0  # bytes of the present request that are not its body
        self.is_in_body = False
        self._url = b""
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    @property
    def is_in_head(self) -> bool:
        """Whether a head has begun to arrive, or what may be one."""
        return self.begun > self.asked or self.excess > 0

    def feed(self, data: bytes) -> None:
        """Count what has arrived; HttpParserError when it is not HTTP."""
        self.excess += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # not supported: uvicorn answers as if it had not been asked for

    def on_message_begin(self) -> None:
        """Count a request, as the parser reads its first byte."""
        self.begun += 1
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """Collect the target."""
        self._url += url

    def on_headers_complete(self) -> None:
        """Count a head; an exception in here refuses the request."""
        httptools.parse_url(self._url).path.decode("ascii")
        self.asked += 1
        self.is_in_body = True

    def on_body(self, body: bytes) -> None:
        """Discount a piece of the body, which may come as a chunk with its length."""
        self.excess -= len(body) + _CHUNK_FRAME

    def on_message_complete(self) -> None:
        """Begin to count for the next request."""
        self.is_in_body = False
        self.excess = 0
