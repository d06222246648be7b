"""Requests and responses in JSON, and bounded reading of request bodies."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from broker_config.protocol.errors import EdgeNodeError
from edge.http.client_group import client_group
from edge.inference.image_decoding import MAX_BYTES
from edge.inference.pipeline import Pipeline

MAX_WAITING = 16  # requests with a body
MAX_HELD = 2 * MAX_BYTES  # bytes of all their bodies together
UPLOAD = 10.0  # seconds in which a body must arrive
INLINE = 1 << 16  # bytes of JSON parsed on the event loop, which takes less than a millisecond

_MAX_JSON = 1 << 20  # bytes of what a page sends
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_SLOWLY = "send them more slowly"
_LATER = {"retry-after": "1"}

T = TypeVar("T")


class RequestError(EdgeNodeError):
    """A request that is not served, with the HTTP status that says so."""

    def __init__(
        self,
        what: str,
        remedy: str,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what, remedy)
        self.status = status
        self.headers = headers or {}


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with anything that msgspec encodes."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: RequestError) -> Response:
    """Return a response that says what was wrong, and what to do."""
    return json_response({"error": error.what, "remedy": error.remedy}, error.status, error.headers)


def client_of(request: Request) -> str:
    """Return what counts as the client that asks; empty if it is gone."""
    return client_group(request.client.host) if request.client else ""


def query(request: Request, name: str, default: str) -> str:
    """Return the first value of a parameter in the URL that is not empty."""
    values = request.query_params.getlist(name)
    return next(filter(None, values), default)


async def chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; RequestError when the client goes away."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as error:
        raise RequestError(
            "the connection ended before the request's body did", "send it again"
        ) from error


async def read_json(request: Request, kind: type[T]) -> T:
    """Read the body as JSON, which must fit `kind`; RequestError when it does not,
    is too large or too slow.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError(
            "the body is not said to be JSON",
            "send it with Content-Type: application/json",
            415,
        )
    body = bytearray()
    async with receiving_in_time():
        async for chunk in chunks(request):
            body += chunk
            if len(body) > _MAX_JSON:
                raise RequestError(
                    f"the request is larger than {_MAX_JSON >> 20} MiB",
                    "send less at once",
                    413,
                )
    decode = partial(msgspec.json.decode, body, type=kind)
    try:
        return decode() if len(body) <= INLINE else await asyncio.to_thread(decode)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"the body does not fit: {error}", "correct that, and send it again"
        ) from error


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client, whose whole body is here,
    has hung up or sends nothing more, which looks the same.
    """
    await request.receive()


@contextlib.asynccontextmanager
async def receiving_in_time() -> AsyncIterator[None]:
    """Bound the time in which a body must arrive; RequestError when it does not."""
    try:
        async with asyncio.timeout(UPLOAD):
            yield
    except TimeoutError as error:
        raise RequestError(
            f"the request's body did not arrive within {UPLOAD:g} s",
            "check the network, or send less",
            408,
        ) from error


class BodyReader:
    """Reads request bodies: a bounded number of them, of bounded size, in bounded time."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.waiting = 0  # requests
        self._held = 0  # bytes

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body, decompressed, held until the context is left;
        RequestError when there is no room for it.
        """
        if self._pipeline.draining:
            raise shutting_down()
        self._check_room()
        held: list[bytes] = []
        try:
            await self._receive(request, held)
            # from now on: whoever announces a body and does not send it takes no room
            with self._waiting():
                await self._unpack(
                    request.headers.get("content-encoding", "identity").lower(), held
                )
                yield held[0]
        finally:
            self._held -= sum(map(len, held))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._check_room()
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def _check_room(self) -> None:
        if self.waiting >= MAX_WAITING:
            raise RequestError(f"{self.waiting} requests are waiting already", _SLOWLY, 503, _LATER)

    async def _receive(self, request: Request, into: list[bytes]) -> None:
        """Fill `into` with the body, as one piece in the end."""
        if int(request.headers.get("content-length", "0")) > MAX_BYTES:
            raise _too_large()
        async with receiving_in_time():
            size = 0
            async for chunk in chunks(request):
                self._hold(into, chunk)
                size += len(chunk)
                if size > MAX_BYTES:
                    raise _too_large()
        into[:] = [b"".join(into)]

    async def _unpack(self, encoding: str, held: list[bytes]) -> None:
        if encoding == "identity":
            return
        if encoding not in ("gzip", "deflate"):
            raise RequestError(
                "the body's Content-Encoding is not known", "use gzip, deflate or none", 415
            )
        self._hold(held, await self._pipeline.run_in_decoder(_decompress, held[0]))
        self._held -= len(held.pop(0))

    def _hold(self, into: list[bytes], data: bytes) -> None:
        self._held += len(data)
        into.append(data)
        if self._held > MAX_HELD:
            raise RequestError(
                f"{MAX_HELD >> 20} MiB of requests are waiting already", _SLOWLY, 503, _LATER
            )


def _decompress(packed: bytes) -> bytes:
    """Decompressed gzip or zlib data, MAX_BYTES at most."""
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = unpacker.decompress(packed, MAX_BYTES + 1)
    except zlib.error as error:
        raise RequestError(
            f"the body cannot be unpacked: {error}", "send it again, or without compression"
        ) from error
    if len(plain) > MAX_BYTES:
        raise _too_large()
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError(
            "the body is not one whole compressed stream", "send it again, or without compression"
        )
    return plain


def shutting_down() -> RequestError:
    """The error for requests that come during shutdown."""
    return RequestError("this line is shutting down", "send the request again when it is back", 503)


def _too_large() -> RequestError:
    return RequestError(
        f"the request is larger than {MAX_BYTES >> 20} MiB",
        "crop the image or save it compressed",
        413,
    )
