"""HTTP server: uvicorn, on uvloop and httptools, with bounded connections."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from edge.http.bounded_connection import KEEP_ALIVE, Application, Connection, Connections

_DRAIN = 15  # seconds for requests in hand


class Server(uvicorn.Server):
    """uvicorn without its signal handling: when to stop is the daemon's decision."""

    def __init__(self, app: Application, on_started: Callable[[], None]) -> None:
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
