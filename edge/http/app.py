"""HTTP interface of a line: its routes, and what they answer."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from edge.http import inference_protocol, openapi
from edge.http.access import Access
from edge.http.login import Logins
from edge.http.openapi import (
    JSON,
    Answer,
    ErrorMessage,
    Operation,
    Parameter,
    refused,
    told,
)
from edge.http.prometheus_metrics import CONTENT_TYPE as METRICS_TYPE
from edge.http.prometheus_metrics import Metrics, Reading
from edge.http.request import (
    INLINE,
    BodyReader,
    RequestError,
    json_response,
    query,
    shutting_down,
    wait_for_disconnect,
)
from edge.http.web_app import Route, WebApp
from edge.http.web_messages import (
    AboutLine,
    InferenceAnswer,
    InferenceQuestion,
    Live,
    ModelMetadata,
    Ready,
    ServerMetadata,
)
from edge.inference.class_prior import is_taught
from edge.inference.image_decoding import ImageError
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import BrokenModelError, Frame, Inspection, Pipeline
from edge.inference.predictor import Outputs
from edge.inference.served_model import Model
from edge.uncertainty.model_warnings import line_warnings
from edge.uncertainty.performance import held_out_performance

BATCH = 8  # images of a request computed at once; other requests are served in between
FEW = 1 << 13  # values of a response that is built on the event loop; likewise
_SMALL = 1 << 20  # bytes of a whole body; likewise
_LONGEST_NAME = 200  # characters
_INFO = {
    "title": "A line of edge-node",
    "version": "2",
    "description": (
        "Inspects images of surfaces. Paths below /v2 are the Open Inference Protocol; errors are "
        "JSON everywhere. Any path but /v2/health may answer 421 (a Host that is not the line's), "
        "403 (a page of another origin), 400 (a header twice) and, to a POST without the line's "
        "token, or to what needs a login without one, 401."
    ),
}

_BINARY = "application/octet-stream"
_HEAD_LENGTH = "inference-header-content-length"


_SLOW_OR_LARGE = {
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body's form or Content-Encoding is not known",
    503: "The line is shutting down, or busy; Retry-After says when to try again",
}
_MODEL_HEADER = {
    "X-Model": (
        "The first 12 digits of the SHA-256 of the manifest of the model that answered",
        str,
    )
}
_NO_MODEL = {404: "There is no such model, or version of it"}
_NAME = Parameter("name", "The node whose model it is")
_VERSION = Parameter("version", "The model's round")
_HEAD_PARAMETER = Parameter(
    "Inference-Header-Content-Length",
    "Bytes of JSON before binary tensors",
    Annotated[int, Meta(ge=0)],
    "header",
)

_ABOUT = Operation(
    "What this line serves",
    {
        200: told(AboutLine, "The bundle, its classes, and where to ask"),
        303: Answer("The way to the page, for a browser: whoever accepts text/html"),
    },
)
_CLASSIFY = Operation(
    "Inspect an image; the verdict goes to all sinks of the line too",
    {
        200: Answer(
            "The verdict, or a picture of it", {JSON: Verdict, "image/jpeg": None}, _MODEL_HEADER
        ),
        **refused(_SLOW_OR_LARGE),
        400: told(
            (Failure, ErrorMessage), "The image could not be inspected, or the request is damaged"
        ),
    },
    (
        Parameter(
            "name",
            "How the verdict calls the image",
            Annotated[str, Meta(max_length=_LONGEST_NAME)],
            "query",
        ),
        Parameter(
            "annotate",
            "Answer with an annotated picture instead of the verdict; heat: also of where each "
            "encoder looked",
            Literal["1", "heat"],
            "query",
        ),
    ),
    {"image/*": None, _BINARY: None},  # JPEG, PNG, BMP, TIFF or WebP
)
_METRICS = Operation("Metrics for Prometheus", {200: Answer("As text", {"text/plain": str})})
_OPENAPI = Operation("This document", {200: told(dict[str, Any], "OpenAPI 3.1")})
_SERVER = Operation("The server", {200: told(ServerMetadata, "Its version and extensions")})
_LIVE = Operation("Whether the server answers", {200: told(Live, "It does")})
_READY = Operation(
    "Whether the line takes images",
    {
        200: told(Ready, "It does"),
        503: told(Ready, "It shuts down, or a thread has not answered of late"),
    },
)
_MODEL = Operation(
    "The model's inputs and outputs",
    {200: told(ModelMetadata, "The model, which is called as its node"), **refused(_NO_MODEL)},
    (_NAME, _VERSION),
)
_MODEL_READY = Operation(
    "Whether the line takes images for this model",
    {**_READY.answers, **refused(_NO_MODEL)},
    (_NAME, _VERSION),
)
_INFER = Operation(
    "Ask the model; the answer goes to nobody else",
    {
        200: Answer(
            "The outputs",
            {JSON: InferenceAnswer, _BINARY: str},
            {**_MODEL_HEADER, "Inference-Header-Content-Length": (_HEAD_PARAMETER.text, int)},
        ),
        **refused(_SLOW_OR_LARGE),
        **refused(_NO_MODEL),
        **refused(
            {
                400: "The request is damaged, or does not fit the model",
                422: "An image file cannot be decoded",
                500: "The model cannot compute",
            }
        ),
    },
    (_NAME, _VERSION, _HEAD_PARAMETER),
    {JSON: InferenceQuestion, _BINARY: str},  # the JSON, then the tensors
)


class App(WebApp):
    """The application that serves a line."""

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: Metrics,
        access: Access | None = None,
        pages: Sequence[Route] = (),
        logins: Logins | None = None,
    ) -> None:
        """`pages` are for people: a browser that asks for nothing in particular gets the first one.

        Without `access` whoever asks is served.
        """
        self._pipeline = pipeline
        self._metrics = metrics
        self._bodies = BodyReader(pipeline)
        self._version = version("edge-node")  # reads files
        self._home = pages[0].path.removeprefix("/") if pages else ""
        metrics.register(self._readings)
        routes = (
            Route("/", "GET", self._about, about=_ABOUT),
            Route("/classify", "POST", self._classify, about=_CLASSIFY),
            Route("/metrics", "GET", self._metrics_page, about=_METRICS),
            Route("/openapi.json", "GET", self._openapi, about=_OPENAPI),
            Route("/v2", "GET", self._server, about=_SERVER),
            Route("/v2/health/live", "GET", self._live, about=_LIVE),
            Route("/v2/health/ready", "GET", self._ready, about=_READY),
            *(
                Route(f"/v2/models/{{name}}{version}{what}", method, handler, about=about)
                for version, (what, method, handler, about) in product(
                    ("", "/versions/{version}"),
                    (
                        ("", "GET", self._model, _MODEL),
                        ("/ready", "GET", self._model_ready, _MODEL_READY),
                        ("/infer", "POST", self._infer, _INFER),
                    ),
                )
            ),
            *pages,
        )
        super().__init__(routes, access, logins, metrics.observe_request)
        described = [route.described for route in self.routes if isinstance(route, Route)]
        self._document = Response(
            openapi.document(_INFO, filter(None, described)), media_type=openapi.JSON
        )

    def _readings(self) -> Iterator[Reading]:
        yield Reading(
            GaugeMetricFamily,
            "http_waiting",
            "Requests with a body that are in hand",
            self._bodies.waiting,
        )

    async def _about(self, request: Request) -> Response:
        if self._home and "text/html" in request.headers.get("accept", ""):  # a browser
            return Response(b"", 303, {"location": self._home, "vary": "accept"})
        model = self._pipeline.model
        manifest = model.manifest
        weights = self._pipeline.prior.weights(manifest.classes, manifest.trained)
        about: AboutLine = {
            "bundle": manifest.id,
            "digest": model.digest,
            "federation": manifest.federation,
            "method": manifest.method,
            "classes": manifest.classes,
            "untaught": [
                name for name in manifest.classes if not is_taught(name, manifest.trained)
            ],
            "prior": dict(zip(manifest.classes, weights.tolist(), strict=True)),
            "model": f"/v2/models/{manifest.node}",
            "classify": "POST an image file's bytes to /classify?name=NAME",
            "comparison": manifest.comparison,
            "performance": held_out_performance(
                manifest, self._pipeline.view, self._pipeline.prior
            ),
            "verified": bool(model.expiry_dates),
            "expires": dict(model.expiry_dates),
            "warnings": line_warnings(model, self._pipeline.view, self._pipeline.prior),
        }
        return json_response(about)

    async def _classify(self, request: Request) -> Response:
        """Inspect the image file in the body, any content type;
        `?name=` is its name in the verdict.

        With `?annotate=1` or `?annotate=heat` the answer is an annotated picture.
        """
        name = query(request, "name", "the request's body")
        if len(name) > _LONGEST_NAME:
            raise RequestError(
                f"the image's name has more than {_LONGEST_NAME} characters",
                "give it a shorter one",
            )
        if request.headers.get("content-type", "").startswith("multipart/"):
            raise RequestError(
                "the body is a form", "send the file alone: curl --data-binary @FILE", 415
            )
        wanted = query(request, "annotate", "")
        if wanted not in ("", "1", "heat"):
            raise RequestError(
                "annotate is neither 1 nor heat", "leave it out for the verdict as JSON"
            )
        async with (
            self._bodies.body(request) as body,
            self._pipeline.inspect(Frame(name, body, "http")) as found,
        ):
            if isinstance(found, Failure):
                return json_response(found, 400)
            headers = {"x-model": found.verdict.model}
            if not wanted:
                return json_response(found.verdict, headers=headers)
            draw = partial(_draw, heat=wanted == "heat")
            picture = await self._pipeline.run_in_decoder(draw, found)
        return Response(picture, media_type="image/jpeg", headers=headers)

    async def _metrics_page(self, _request: Request) -> Response:
        # sinks' readings wait for what is being written to the outbox
        metrics = await asyncio.to_thread(self._metrics.exposition, self._pipeline.model)
        return Response(metrics, media_type=METRICS_TYPE.decode())

    async def _openapi(self, _request: Request) -> Response:
        return self._document

    async def _server(self, _request: Request) -> Response:
        extensions = ["binary_tensor_data", "classification"]
        return json_response(
            {"name": "edge-node", "version": self._version, "extensions": extensions}
        )

    async def _live(self, _request: Request) -> Response:
        return json_response({"live": True})

    async def _ready(self, _request: Request) -> Response:
        return self._readiness({"ready": self._is_ready})

    async def _model_ready(self, request: Request) -> Response:
        self._find_model(request)
        return self._readiness({"name": request.path_params["name"], "ready": self._is_ready})

    @property
    def _is_ready(self) -> bool:
        return not (self._pipeline.draining or self._pipeline.stalled)

    def _readiness(self, content: dict[str, Any]) -> Response:
        status = 200 if content["ready"] else 503
        return json_response(content, status)

    async def _model(self, request: Request) -> Response:
        return json_response(inference_protocol.metadata(self._find_model(request)))

    def _find_model(self, request: Request) -> Model:
        """The model named in the path."""
        model = self._pipeline.model
        if request.path_params["name"] != model.manifest.node:
            raise RequestError(
                "there is no model of that name", f"ask for {model.manifest.node}", 404
            )
        if request.path_params.get(
            "version", inference_protocol.version(model)
        ) != inference_protocol.version(model):
            raise RequestError(
                "that version of the model is not served",
                f"ask for version {inference_protocol.version(model)}, or for none",
                404,
            )
        return model

    async def _infer(self, request: Request) -> Response:
        """Serve an inference request; the whole response is from the model that was served when
        it was read.
        """
        async with self._bodies.body(request) as body:
            model = self._find_model(request)
            try:
                inference = await self._parse_inference(request, body, model)
                parts = await self._compute_outputs(inference, model, request)
            except inference_protocol.InvalidRequestError as error:
                raise RequestError(
                    f"the inference request does not fit: {error}",
                    "compare it with the model's metadata",
                ) from error

            def build(outputs: Sequence[Outputs]) -> tuple[bytes, int | None]:
                whole = inference_protocol.concatenate(outputs)
                return inference_protocol.build_response(inference, model, whole)

            values = len(parts) * inference_protocol.value_count(inference, model, parts[0])
            if values <= FEW:
                content, head = build(parts)
            else:
                content, head = await self._pipeline.run_in_decoder(build, parts)
        named = {"x-model": model.digest}
        if head is None:
            return Response(content, headers=named, media_type="application/json")
        return Response(content, headers=named | {_HEAD_LENGTH: str(head)}, media_type=_BINARY)

    async def _parse_inference(
        self, request: Request, body: bytes, model: Model
    ) -> inference_protocol.InferenceRequest:
        given = request.headers.get(_HEAD_LENGTH)
        if given is not None and not (given.isdecimal() and given.isascii() and len(given) < 10):
            raise inference_protocol.InvalidRequestError(
                "its Inference-Header-Content-Length is no number of bytes"
            )
        head = None if given is None else int(given)

        def parse(content: bytes) -> inference_protocol.InferenceRequest:
            return inference_protocol.parse(content, head, model.manifest)

        head_size = len(body) if head is None else head
        if len(body) <= _SMALL and head_size <= INLINE:
            return parse(body)
        return await self._pipeline.run_in_decoder(parse, body)

    async def _compute_outputs(
        self, inference: inference_protocol.InferenceRequest, model: Model, request: Request
    ) -> list[Outputs]:
        """The model's outputs for all images, a few at a time,
        as long as somebody waits for the response, which must not be too large.
        """
        extras = [
            wanted.name for wanted in inference.outputs if wanted.name != model.manifest.output
        ]
        parts = []
        leaving = asyncio.create_task(wait_for_disconnect(request))
        try:
            for first in range(0, inference.image_count, BATCH):
                if first:
                    self._check_still_wanted(leaving)
                images = await self._load_images(inference, model, slice(first, first + BATCH))
                parts.append(await self._pipeline.infer(model, images, extras))
                if not first:
                    inference_protocol.value_count(inference, model, parts[0])
        except ImageError as error:
            raise RequestError(error.what, error.remedy, 422) from error
        except BrokenModelError as error:
            raise RequestError(error.what, error.remedy, 500) from error
        finally:
            leaving.cancel()
        return parts

    def _check_still_wanted(self, leaving: asyncio.Task[None]) -> None:
        """RequestError when there is no point in going on."""
        if leaving.done():
            raise RequestError(
                "the connection ended before the answer was there", "leave it open until then"
            )
        if self._pipeline.draining:
            raise shutting_down()

    async def _load_images(
        self, inference: inference_protocol.InferenceRequest, model: Model, some: slice
    ) -> NDArray[np.uint8]:
        if inference.images is not None:
            return inference.images[some]
        size = model.manifest.input.size
        files = enumerate(inference.files[some], some.start)
        return np.stack(
            [await self._pipeline.decode(file, size, f"image {number}") for number, file in files]
        )


def _draw(inspection: Inspection, *, heat: bool) -> bytes:
    # Few ask for pictures
    from edge.inference.annotation import annotate, encode_jpeg  # noqa: PLC0415

    return encode_jpeg(annotate(inspection, heat=heat))
