"""HTTP interface of a line: its routes, and what they answer."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from edge.daemon.prometheus_metrics import CONTENT_TYPE as METRICS_TYPE
from edge.daemon.prometheus_metrics import Metrics, Reading
from edge.http import inference_protocol
from edge.http.access import Access
from edge.http.login import Logins
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
from edge.inference.class_prior import is_taught
from edge.inference.image_decoding import ImageError
from edge.inference.outcomes import Failure
from edge.inference.pipeline import BrokenModelError, Frame, Inspection, Pipeline
from edge.inference.predictor import Outputs
from edge.inference.served_model import Model
from edge.uncertainty.model_warnings import line_warnings
from edge.uncertainty.performance import held_out_performance

BATCH = 8  # images of a request computed at once; other requests are served in between
FEW = 1 << 13  # values of a response that is built on the event loop; likewise
_SMALL = 1 << 20  # bytes of a whole body; likewise
_LONGEST_NAME = 200  # characters
_OPENAPI = Path(__file__).with_name("openapi.json")

_BINARY = "application/octet-stream"
_HEAD_LENGTH = "inference-header-content-length"


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
        self._document = Response(_OPENAPI.read_bytes(), media_type="application/json")
        self._home = pages[0].path.removeprefix("/") if pages else ""
        metrics.register(self._readings)
        routes = (
            Route("/", "GET", self._about),
            Route("/classify", "POST", self._classify),
            Route("/metrics", "GET", self._metrics_page),
            Route("/openapi.json", "GET", self._openapi),
            Route("/v2", "GET", self._server),
            Route("/v2/health/live", "GET", self._live),
            Route("/v2/health/ready", "GET", self._ready),
            *(
                Route(f"/v2/models/{{name}}{version}{what}", method, handler)
                for version, (what, method, handler) in product(
                    ("", "/versions/{version}"),
                    (
                        (
                            ("", "GET", self._model),
                            ("/ready", "GET", self._model_ready),
                            ("/infer", "POST", self._infer),
                        )
                    ),
                )
            ),
            *pages,
        )
        super().__init__(routes, access, logins, metrics.observe_request)

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
        about = {
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
