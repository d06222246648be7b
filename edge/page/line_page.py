"""The page of a line: what a line sees, decides and complains about, live,
for whoever stands beside it.

It changes nothing: who may reach the line over HTTP may watch.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Literal, TypedDict

from msgspec import Meta
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from edge.http.openapi import Answer, Operation, Parameter, refused, told
from edge.http.prometheus_metrics import Reading
from edge.http.request import RequestError, json_response, query
from edge.http.web_app import Route
from edge.inference.outcomes import current_time
from edge.inference.pipeline import Inspection, Pipeline
from edge.labelling.field_accuracy import FieldAccuracy
from edge.page.label_page import LabelPage
from edge.page.page_files import page_routes
from edge.page.recent_inspections import PINNED, RecentInspections, Reject, Snapshot
from edge.uncertainty.drift import Drift
from edge.uncertainty.model_warnings import ModelWarning, line_warnings
from edge.uncertainty.performance import Proportion, held_out_performance

PATH = "/line/"
_FRESH = {"cache-control": "no-store"}


class ServedModel(TypedDict):
    """The model that is served."""

    bundle: str
    method: str
    round: int
    has_heat: Annotated[bool, Meta(description="Whether pictures have heat maps")]
    accuracy: Proportion | None


class DriftLevel(TypedDict):
    """How far features have strayed."""

    drifted: bool
    level: Annotated[float, Meta(description="In control limits")]


class LineState(Snapshot):
    """What a line sees, decides and complains about."""

    line: str
    time: str
    state: Literal["ready", "draining", "stalled"]
    model: ServedModel
    warnings: Sequence[ModelWarning]
    away: Annotated[
        Sequence[str],
        Meta(description="Sinks whose receivers take no verdicts now; these wait in the outbox"),
    ]
    drift: DriftLevel | None
    labels: Annotated[
        Sequence[str] | None,
        Meta(description="Classes that images can be given here; null: none"),
    ]
    labels_damaged: Annotated[
        bool,
        Meta(description="Whether nobody can label, since the history of labels is damaged"),
    ]
    field: Annotated[
        FieldAccuracy | None,
        Meta(description="What labels of images kept at random say of the model that is served"),
    ]


_GONE = {404: "It is not held any more"}
_ID = Parameter("id", "The id of the verdict")
_STATE = Operation(
    "What there is to see now",
    {200: told(LineState, "The state of the line")},
    (Parameter("held", "The id of a verdict whose picture is to be held on", str, "query"),),
)
_PICTURE = Operation(
    "The frame of the last verdict of a state, with its tiles",
    {200: Answer("The frame", {"image/jpeg": None}), **refused(_GONE)},
    (
        _ID,
        Parameter("heat", "1: under the heat map of the verdict's class", Literal["1"], "query"),
    ),
)
_REJECT = Operation(
    "What the network saw of one of the last defects",
    {200: Answer("What it saw", {"image/jpeg": None}), **refused(_GONE)},
    (_ID,),
)


class LinePage:
    """The page, and what it asks for."""

    def __init__(
        self,
        line: str,
        pipeline: Pipeline,
        recent: RecentInspections,
        drift: Callable[[], Drift | None],
        labels: LabelPage | None = None,
        away: Callable[[], Sequence[str]] = tuple,
        *,
        labels_damaged: bool = False,
    ) -> None:
        """With `labels` a verdict can be overruled, and what labels say of the model is shown.

        `away` returns the sinks whose receivers take no verdicts now. `labels_damaged` says that
        `labels` is missing because the history could not be read.
        """
        self._labels = labels
        self._away = away
        self._labels_damaged = labels_damaged
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
        yield Route(f"{PATH}state", "GET", self._state, about=_STATE)
        yield Route(f"{PATH}pictures/{{id}}", "GET", self._picture, about=_PICTURE)
        yield Route(f"{PATH}rejects/{{id}}", "GET", self._reject, about=_REJECT)

    def readings(self) -> Iterator[Reading]:
        """Yield whether labels are damaged, for Prometheus."""
        text = "1 while nobody can label, since the history of labels is damaged"
        yield Reading(GaugeMetricFamily, "labels_damaged", text, self._is_damaged)

    @property
    def _is_damaged(self) -> bool:
        return self._labels.is_damaged if self._labels else self._labels_damaged

    async def _state(self, request: Request) -> Response:
        """What there is to see; an image whose id is given as `?held=` is held on."""
        pipeline = self._pipeline
        drift = self._drift()
        model = pipeline.model
        manifest = model.manifest
        if pipeline.model.predictor.reference is None:
            drift = None  # there is nothing that it could be measured by
        measured = held_out_performance(manifest, pipeline.view, pipeline.prior)
        state: Literal["ready", "draining", "stalled"]
        if pipeline.draining:
            state = "draining"
        elif pipeline.stalled:
            state = "stalled"
        else:
            state = "ready"
        accuracy = measured.accuracy if measured else None
        classes = self._labels.classes if self._labels else None
        field = self._labels.field if self._labels else None
        strayed: DriftLevel | None = None
        if drift:
            strayed = {"drifted": drift.drifted, "level": max(drift.level, drift.excess)}
        found: LineState = {
            "line": self._line,
            "time": current_time(),
            "state": state,
            "model": {
                "bundle": manifest.id,
                "method": manifest.method,
                "round": manifest.round,
                "has_heat": "maps" in manifest.extras,
                "accuracy": accuracy,
            },
            "warnings": line_warnings(model, pipeline.view, pipeline.prior),
            "away": self._away(),
            "drift": strayed,
            "labels": classes,
            "labels_damaged": self._is_damaged,
            "field": field,
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
