"""The page of a line: what a line sees, decides and complains about, live,
for whoever stands beside it.

It changes nothing: who may reach the line over HTTP may watch.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edge.http.request import RequestError, json_response, query
from edge.http.web_app import Route
from edge.inference.outcomes import current_time
from edge.inference.pipeline import Inspection, Pipeline
from edge.page.label_page import LabelPage
from edge.page.page_files import page_routes
from edge.page.recent_inspections import PINNED, RecentInspections, Reject
from edge.uncertainty.drift import Drift
from edge.uncertainty.model_warnings import line_warnings
from edge.uncertainty.performance import held_out_performance

PATH = "/line/"
_FRESH = {"cache-control": "no-store"}


class LinePage:
    """The page, and what it asks for."""

    def __init__(
        self,
        line: str,
        pipeline: Pipeline,
        recent: RecentInspections,
        drift: Callable[[], Drift | None],
        labels: LabelPage | None = None,
    ) -> None:
        """With `labels` a verdict can be overruled, and what labels say of the model is shown."""
        self._labels = labels
        self._line = line
        self._pipeline = pipeline
        self._recent = recent
        self._drift = drift
        self._drawn = OrderedDict[tuple[str, bool], bytes]()  # by verdict, without and with heat
        self._drawing = asyncio.Lock()  # however many watch, one decoder thread is left to the line

    @property
    def routes(self) -> Iterator[Route]:
        """Paths below PATH."""
        yield from page_routes(PATH, "line.html", ("line.css", "line.js", "strings.json"))
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "state": self._state,
            "pictures/{id}": self._picture,
            "rejects/{id}": self._reject,
        }
        for name, handler in handlers.items():
            yield Route(PATH + name, "GET", handler)

    async def _state(self, request: Request) -> Response:
        """What there is to see; an image whose id is given as `?held=` is held on."""
        pipeline = self._pipeline
        drift = self._drift()
        model = pipeline.model
        manifest = model.manifest
        if pipeline.model.predictor.reference is None:
            drift = None  # there is nothing that it could be measured by
        measured = held_out_performance(manifest, pipeline.view, pipeline.prior)
        if pipeline.draining:
            state = "draining"
        elif pipeline.stalled:
            state = "stalled"
        else:
            state = "ready"
        found: dict[str, Any] = {
            "line": self._line,
            "time": current_time(),
            "state": state,
            "model": {
                "bundle": manifest.id,
                "digest": model.digest,
                "federation": manifest.federation,
                "method": manifest.method,
                "round": manifest.round,
                "has_heat": "maps" in manifest.extras,
                "accuracy": measured and measured.accuracy,
            },
            "warnings": line_warnings(model, pipeline.view, pipeline.prior),
            "drift": drift and {"drifted": drift.drifted, "level": max(drift.level, drift.excess)},
            "labels": self._labels and self._labels.classes,
            "field": self._labels and self._labels.field,
            **self._recent.snapshot(query(request, "held", "")),
        }
        return json_response(found, headers=_FRESH)

    async def _picture(self, request: Request) -> Response:
        """An inspected frame with its tiles, as JPEG; with `?heat=1` under its heat map,
        if its bundle has maps.
        """
        inspection = self._recent.find(request.path_params["id"])
        heat = query(request, "heat", "") == "1"
        if inspection is None:
            raise _gone()
        wanted = inspection.verdict.id, heat
        async with self._drawing:
            if wanted not in self._drawn:
                self._drawn[wanted] = await self._pipeline.run_in_decoder(
                    partial(_draw, heat=heat), inspection
                )
                while len(self._drawn) > 2 * PINNED:
                    self._drawn.popitem(last=False)
            return Response(self._drawn[wanted], media_type="image/jpeg", headers=_FRESH)

    async def _reject(self, request: Request) -> Response:
        """What the network saw of one of the last defects, as JPEG."""
        reject = self._recent.find_reject(request.path_params["id"])
        if reject is None:
            raise _gone()
        picture = await self._pipeline.run_in_decoder(_encode, reject)
        return Response(picture, media_type="image/jpeg", headers=_FRESH)


def _draw(inspection: Inspection, *, heat: bool) -> bytes:
    # Nobody may ever look
    from edge.inference.annotation import encode_jpeg, render_frame  # noqa: PLC0415

    return encode_jpeg(render_frame(inspection, heat=heat))


def _encode(reject: Reject) -> bytes:
    from edge.inference.annotation import encode_jpeg  # noqa: PLC0415

    return encode_jpeg(reject.pixels)


def _gone() -> RequestError:
    return RequestError(
        "this image is not held any more",
        "ask for the line's state again, and then for its last one",
        404,
    )
