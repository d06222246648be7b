"""The line over HTTP: images in, verdicts out; health and metadata as in the Open Inference Protocol (v2)."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from broker_config.errors import EdgeNodeError
from edge.expiry import warnings
from edge.images import MAX_BYTES
from edge.line import Frame, Line
from edge.verdict import Failure

MAX_WAITING = 16  # images, together at most MAX_WAITING * MAX_BYTES
UPLOAD = 10.0  # seconds that a client may take to send an image


class _RequestError(EdgeNodeError):
    """A request that is not served, with the HTTP status that says so."""

    def __init__(self, status: int, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.status = status


class App(Starlette):
    """The application that serves a line; holds at most MAX_WAITING images at a time."""

    def __init__(self, line: Line) -> None:
        super().__init__(
            routes=[
                Route("/", self._about),
                Route("/classify", self._classify, methods=["POST"]),
                Route("/v2/health/live", self._live),
                Route("/v2/health/ready", self._ready),
                Route("/v2/models/{name}", self._model),
            ],
            exception_handlers={_RequestError: _refuse},
        )
        self._line = line
        self._waiting = 0

    async def _about(self, _request: Request) -> Response:
        manifest = self._line.model.manifest
        about = {
            "bundle": manifest.id,
            "federation": manifest.federation,
            "method": manifest.method,
            "classes": manifest.classes,
            "model": f"/v2/models/{manifest.node}",
            "classify": "POST an image file's bytes to /classify?name=NAME",
            "verified": bool(self._line.model.ends),
            "expires": dict(self._line.model.ends),
            "warnings": warnings(self._line.model.ends, datetime.now(UTC)),
        }
        return _json(about)

    async def _classify(self, request: Request) -> Response:
        """Judge the image file in the body, any content type; `?name=` is how the verdict calls it."""
        if self._line.draining:
            raise _RequestError(503, "this line is shutting down", "send the image again when it is back")
        if self._waiting >= MAX_WAITING:
            raise _RequestError(503, f"{self._waiting} images are waiting already", "send images more slowly")
        self._waiting += 1
        try:
            frame = Frame(request.query_params.get("name", "the request's body"), await _body(request), "http")
            outcome = await self._line.judge(frame)
        finally:
            self._waiting -= 1
        return _json(outcome, 400 if isinstance(outcome, Failure) else 200)

    async def _live(self, _request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, _request: Request) -> Response:
        ready = not self._line.draining
        return _json({"ready": ready}, 200 if ready else 503)

    async def _model(self, request: Request) -> Response:
        manifest = self._line.model.manifest
        if request.path_params["name"] != manifest.node:
            raise _RequestError(404, f"there is no model {request.path_params['name']}", f"ask for {manifest.node}")
        size = manifest.input.size
        metadata = {
            "name": manifest.node,
            "versions": [str(manifest.round)],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": manifest.input.name, "datatype": "UINT8", "shape": [-1, size, size, 3]}],
            "outputs": [{"name": manifest.output, "datatype": "FP32", "shape": [-1, len(manifest.classes)]}],
        }
        return _json(metadata)


async def _body(request: Request) -> bytes:
    """The request's body, of at most MAX_BYTES, sent within UPLOAD seconds."""
    body = bytearray()
    try:
        async with asyncio.timeout(UPLOAD):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise _RequestError(
                        413, f"the image is larger than {MAX_BYTES >> 20} MiB", "crop it or save it compressed"
                    )
    except TimeoutError as error:
        raise _RequestError(
            408, f"the image did not arrive within {UPLOAD:g} s", "check the network, or send less"
        ) from error
    except ClientDisconnect as error:
        raise _RequestError(400, "the connection ended before the image did", "send it again") from error
    return bytes(body)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _refuse(_request: Request, error: Any) -> Response:
    return _json({"error": error.what, "remedy": error.remedy}, error.status)
