"""The least that HTTP takes, asyncio's protocol on httptools: `python -m
benchmarks.serving.protocol_service BUNDLE THREADS PORT|SOCKET`.

The model runs in the event loop's thread: nobody else could be served meanwhile. There are no
routes, no limits and no access control.
"""

import asyncio
import sys
from pathlib import Path

import httptools
import numpy as np
import uvloop

from benchmarks.serving.onnxruntime_baseline import Bare


class Connection(asyncio.Protocol):
    """Answers each request's picture, its body, with the probabilities as JSON."""

    def __init__(self, model: Bare) -> None:
        self._model, self._body = model, list[bytes]()
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep it."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Answer."""
        size = self._model.size
        pixels = np.frombuffer(b"".join(self._body), np.uint8).reshape(1, size, size, 3)
        self._body.clear()
        answer = str(self._model.run(pixels)[0].tolist()).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)
        )


async def serve(model: Bare, address: str) -> None:
    """Until it is killed."""
    loop = asyncio.get_running_loop()
    if address.isdigit():
        server = await loop.create_server(lambda: Connection(model), "127.0.0.1", int(address))
    else:
        server = await loop.create_unix_server(lambda: Connection(model), address)
    await server.serve_forever()


if __name__ == "__main__":
    bundle, threads, address = sys.argv[1:]
    uvloop.run(serve(Bare(Path(bundle), int(threads)), address))
