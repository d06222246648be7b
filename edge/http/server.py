"""HTTP server: uvicorn, on uvloop and httptools, with bounded connections."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from broker_config.protocol.errors import EdgeNodeError
from edge.http.bounded_connection import KEEP_ALIVE, Connection, Connections

_DRAIN = 15  # seconds for requests in hand


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; port 0 takes a free one.

    EdgeNodeError if it cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        # With its protocol named, asyncio turns Nagle's algorithm off; answers would wait 40 ms
        # otherwise.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # now: until then another daemon could bind the port too
    except OSError as error:
        raise EdgeNodeError(
            f"cannot listen on {host}, port {port}: {error.strerror}",
            "stop the program that holds the port, or take another with --port (0: any that "
            "is free)",
        ) from error
    return listener


class Server(uvicorn.Server):
    """uvicorn without its signal handling: when to stop is the daemon's decision."""

    def __init__(self, app: ASGIApp, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                Connections(app),
                http=Connection,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",  # a client's mistakes are reported to the client
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=_DRAIN,
            )
        )
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report when requests are answered."""
        await super().startup(sockets)
        self._on_started()
