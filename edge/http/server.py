"""uvicorn with uvloop's and httptools' speed, within bounds for clients that are slow, many, or say too much."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MAX_CONNECTIONS = 256
MAX_HEAD = 1 << 16  # bytes of a request besides its body
MAX_PIPELINED = 8  # requests that wait for the answer to one before them
HEAD_TIME = 10.0  # seconds in which a request's head must arrive, from its first byte on
LINGER = 5.0  # seconds for the rest of a body that was refused
SEND_TIME = 30.0  # seconds in which a client must read something
_CHUNK_FRAME = 16  # bytes around a chunk of a body, at most
_DRAIN = 15  # seconds for requests in hand
_KEEP_ALIVE = 300  # seconds between the images of a slow line, on one connection


class Server(uvicorn.Server):
    """uvicorn, without its signal handling: when to stop is the daemon's decision."""

    def __init__(self, app: Any, started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",  # what a client does wrong is told to the client
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_DRAIN,
            )
        )
        self._on_started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell when requests are answered."""
        await super().startup(sockets)
        self._on_started()


class BoundedProtocol(HttpToolsProtocol):
    """One connection, which can hold only so much, for only so long.

    uvicorn bounds neither the number of connections, nor a request's head in size or time, nor the time of a client
    that does not read its answer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._excess = 0  # bytes of the request that are not its body
        self._in_body = False
        self._answering: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None  # for the client to say what it has begun to say
        self._reading: asyncio.TimerHandle | None = None  # for the client to read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if need be in the place of the one that has been idle the longest."""
        if len(self.connections) >= MAX_CONNECTIONS and not self._displace():
            self.transport = transport
            self._refuse(503, "too many connections", "close some, or keep one for all images")
            return
        super().connection_made(transport)
        # As between two requests: until it says something it is idle.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget all timers; the request in hand learns that nobody waits for its answer."""
        self._expect_nothing()
        self._stop_waiting()
        if self._answering:  # uvicorn tells the last one only, of several that were sent at once
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Read on, unless it is too much that is no body."""
        self._excess += len(data)
        super().data_received(data)
        if self._excess > MAX_HEAD:
            self._refuse(431, f"the request has more than {MAX_HEAD >> 10} KiB besides its body", "send less")
        elif self._excess > 0 and not self._in_body and not self._deadline:
            self._expect_within(HEAD_TIME)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that will say no more what it has asked; True while there is something to answer."""
        asked = self._answering
        if asked is None or asked.response_complete or self._in_body:
            return False
        asked.message_event.set()  # most have hung up: what takes long need not go on
        self.cycle.keep_alive = False  # the last one, of several that were sent at once
        return True

    def on_message_begin(self) -> None:
        """Count requests that wait; an exception in here refuses the connection."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Leave the body's time to the application."""
        self._in_body = True
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, which may come as a chunk with its length."""
        self._excess -= len(body) + _CHUNK_FRAME
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Begin to count for the next request."""
        self._in_body = False
        self._excess = 0
        self._expect_nothing()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give a client that has its answer, and is sending still, a moment to notice."""
        super().on_response_complete()
        if self._in_body:
            self._expect_within(LINGER)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Say that this is not HTTP."""
        self._refuse(400, "this is not a whole HTTP request", "see /openapi.json for what the line understands")

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._reading = self.loop.call_later(SEND_TIME, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self._stop_waiting()

    def _displace(self) -> bool:
        """Close the connection that has been idle the longest, if one is."""
        idle = [
            (each.timeout_keep_alive_task.when(), each)
            for each in self.connections
            if isinstance(each, BoundedProtocol) and each.timeout_keep_alive_task
        ]
        if not idle:
            return False
        _, longest = min(idle, key=lambda pair: pair[0])
        longest._unset_keepalive_if_required()
        longest.transport.close()
        return True

    def _expect_within(self, seconds: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(
            seconds, self._refuse, 408, "the request did not arrive in time", "check the network, or send less"
        )

    def _expect_nothing(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _stop_waiting(self) -> None:
        if self._reading:
            self._reading.cancel()
            self._reading = None

    def _refuse(self, status: int, what: str, remedy: str) -> None:
        """End the connection, with an answer unless one is under way or was given."""
        if self.transport.is_closing():
            return
        if self.cycle is None or (self.cycle.response_complete and not self._in_body):
            body = msgspec.json.encode({"error": what, "remedy": remedy})
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
