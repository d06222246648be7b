"""One HTTP request and its response, and bounded reading of request bodies."""

import asyncio
import contextlib
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec

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
_JSON = b"application/json"
_ONCE = (b"host", b"origin", b"authorization", b"content-type", b"content-encoding")
_SLOWLY = "send them more slowly"
_LATER = {b"retry-after": b"1"}

Receive = Callable[[], Any]
T = TypeVar("T")


class RequestError(EdgeNodeError):
    """A request that is not served, with the HTTP status that says so."""

    def __init__(
        self,
        what: str,
        remedy: str,
        status: int = 400,
        headers: Mapping[bytes, bytes] | None = None,
    ) -> None:
        super().__init__(what, remedy)
        self.status = status
        self.headers = headers or {}


class Response(NamedTuple):
    """The response to a client."""

    body: bytes
    status: int = 200
    kind: bytes = _JSON
    headers: Mapping[bytes, bytes] = {}
    # what follows the body, piece by piece, as long as the client listens
    stream: AsyncGenerator[bytes] | None = None
    cookies: Sequence[bytes] = ()  # a Set-Cookie header for each

    @classmethod
    def json(
        cls, content: Any, status: int = 200, headers: Mapping[bytes, bytes] | None = None
    ) -> "Response":
        """A response with anything that msgspec encodes."""
        return cls(msgspec.json.encode(content), status, headers=headers or {})

    @classmethod
    def from_error(cls, error: RequestError) -> "Response":
        """A response that says what was wrong, and what to do."""
        return cls.json({"error": error.what, "remedy": error.remedy}, error.status, error.headers)


class Request:
    """A request as ASGI gives it."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.names: dict[str, str] = {}  # the parameters in the path
        self.user = ""  # who has logged in, on a route that asks
        self.folders: frozenset[Path] = frozenset()  # state folders where that login counts
        self._scope = scope
        self._receive = receive

    @cached_property
    def headers(self) -> dict[bytes, bytes]:
        """Headers by lower-case name; of a repeated one the last."""
        return dict(self._scope["headers"])

    @property
    def client(self) -> str:
        """What counts as the client that asks; empty if it is gone."""
        address = self._scope.get("client")
        return client_group(address[0]) if address else ""

    def check_headers(self) -> None:
        """RequestError when a header that decides who is served stands there twice: a proxy may
        have looked at the other one.
        """
        names = [name for name, _ in self._scope["headers"]]
        for name in _ONCE:
            if names.count(name) > 1:
                raise RequestError(
                    f"the request has more than one header {name.decode().title()}",
                    "send it once",
                )

    def query(self, name: str, default: str) -> str:
        """The first value of a parameter in the URL."""
        query: bytes = self._scope["query_string"]
        return parse_qs(query.decode("latin-1")).get(name, [default])[0]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it arrives; RequestError when the client goes away."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RequestError(
                    "the connection ended before the request's body did", "send it again"
                )
            yield message.get("body", b"")
            more = message.get("more_body", False)

    async def json(self, kind: type[T]) -> T:
        """The body as JSON, which must fit `kind`; RequestError when it does not,
        is too large or too slow.
        """
        if self.headers.get(b"content-type", b"").partition(b";")[0].strip() != _JSON:
            raise RequestError(
                "the body is not said to be JSON",
                "send it with Content-Type: application/json",
                415,
            )
        body = bytearray()
        async with receiving_in_time():
            async for chunk in self.chunks():
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

    async def wait_for_disconnect(self) -> None:
        """Return when the client, whose whole body is here,
        has hung up or sends nothing more, which looks the same.
        """
        await self._receive()


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


class Route(NamedTuple):
    """A path, a method and their handler."""

    template: str
    method: str
    handler: Callable[[Request], Awaitable[Response]]
    # a token is needed by what is not read only, if there is one
    # "known": nothing, but whoever has logged in is told from others
    needs: Literal["token", "login", "known", "nothing"] = "token"


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
                    request.headers.get(b"content-encoding", b"identity").lower(), held
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
        if int(request.headers.get(b"content-length", b"0")) > MAX_BYTES:
            raise _too_large()
        async with receiving_in_time():
            size = 0
            async for chunk in request.chunks():
                self._hold(into, chunk)
                size += len(chunk)
                if size > MAX_BYTES:
                    raise _too_large()
        into[:] = [b"".join(into)]

    async def _unpack(self, encoding: bytes, held: list[bytes]) -> None:
        if encoding == b"identity":
            return
        if encoding not in (b"gzip", b"deflate"):
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
