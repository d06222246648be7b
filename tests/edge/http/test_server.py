"""The server: it says when it answers, leaves signals to the daemon,
and ends when it is told to.
"""

import asyncio
import signal
import socket
from typing import Any

from edge.http.server import Server


def test_it_answers_once_it_has_said_so_and_leaves_signals_alone() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> bytes:
        started = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = Server(app, started.set)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await started.wait()
            assert signal.getsignal(signal.SIGTERM) is before
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await reader.readuntil(b"ok")
            server.should_exit = True
            await serving
            assert await reader.read() == b""  # an idle connection does not keep it
            writer.close()
            return answer

    before = signal.getsignal(signal.SIGTERM)
    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 OK")
