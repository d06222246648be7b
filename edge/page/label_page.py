"""The page of labels: a line's images that wait for one, and people who give it,
one after another or many at once.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec import Meta, Struct
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.http.openapi import JSON, Answer, Operation, Parameter, refused, told
from edge.http.prometheus_metrics import Reading
from edge.http.request import RequestError, json_response, query, read_json
from edge.http.web_app import Route, user_of
from edge.inference.pipeline import Pipeline
from edge.labelling.field_accuracy import FieldAccuracy, judge_field
from edge.labelling.label_queue import LabelQueue, WaitingImage
from edge.page.page_files import page_routes
from edge.page.recent_inspections import RecentInspections
from edge.uncertainty.performance import held_out_performance

PATH = "/labels/"
_SIDES = {"small": 192, "large": 1024}  # pixels of a picture
MOST_PICTURES = 32  # at once
LOOK_AGAIN = 5.0  # seconds between two looks at which classes have a folder
_FRESH = {"cache-control": "no-store"}
_SAME_FOR_EVER = {"cache-control": "private, max-age=86400, immutable"}

T = TypeVar("T")


class Labels(Struct, frozen=True):
    """A label for some images, by the names of their files; None: they shall teach nothing."""

    images: tuple[str, ...]
    label: str | None


class Overruled(Struct, frozen=True):
    """A verdict that a person does not believe, by its id."""

    id: str


class WaitingImages(TypedDict):
    """The images that wait, the most instructive first."""

    line: str
    waiting: Annotated[int, Meta(ge=0)]
    classes: NotRequired[Sequence[str]]
    images: NotRequired[Sequence[WaitingImage]]


class LabelledCount(TypedDict):
    """How many images have the label now, on the disk."""

    labelled: Annotated[int, Meta(ge=0)]
    gone: Annotated[
        Sequence[str],
        Meta(description="Images that got none: they have another already, or are kept no more"),
    ]


class TakenBack(TypedDict):
    """A label that was taken back, and the images that wait again."""

    label: str | None
    images: Sequence[str]


class KeptFile(TypedDict):
    """An image that waits now."""

    kept: str


_MISFIT = {400: "The body does not fit"}
_QUEUE = Operation(
    "The images that wait for a label, the most instructive first",
    {
        200: told(WaitingImages, "The images that wait"),
        **refused({409: "The line keeps no images"}),
    },
    (Parameter("count", "1: only how many", Literal["1"], "query"),),
)
_PICTURE = Operation(
    "What the network saw of an image that waits",
    {
        200: Answer("The picture", {"image/jpeg": None}),
        **refused(
            {
                400: "There is no such size",
                404: "It is not kept any more",
                503: "Too many pictures are asked for; Retry-After says when to try again",
            }
        ),
    },
    (
        Parameter("name", "Its file"),
        Parameter("size", "Within 192 or 1024 pixels", Literal["small", "large"], "query"),
    ),
)
_LABEL = Operation(
    "Give images a label; needs a login",
    {200: told(LabelledCount, "Done"), **refused(_MISFIT)},
    body={JSON: Labels},
)
_UNDO = Operation(
    "Take one's own newest label back; needs a login",
    {200: told(TakenBack, "Done"), **refused({409: "There is none"})},
    body={JSON: dict[str, Any]},
)
_OVERRULE = Operation(
    "Have an image that is shown wait before all others; needs a login",
    {
        200: told(KeptFile, "Done"),
        **refused(_MISFIT),
        **refused({404: "It is not held any more"}),
    },
    body={JSON: Overruled},
)


class LabelPage:
    """The page, what it asks for, and what it changes: the latter needs a login."""

    def __init__(
        self,
        line: str,
        pipeline: Pipeline,
        recent: RecentInspections,
        queue: LabelQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._line = line
        self._pipeline = pipeline
        self._recent = recent
        self._queue = queue
        # the queue's; inspection goes on meanwhile
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="labels")
        # pictures of large images take long: a label does not wait for them
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="label pictures")
        self._pictures = 0  # that are asked for
        self._clock = clock
        self._folders: list[str] = []  # names of classes
        self._is_looking = False
        self._looked_at = 0.0
        self._look()
        self._field: tuple[str, FieldAccuracy | None] = "", None  # of the model with this digest

    @property
    def routes(self) -> Iterator[Route]:
        """Paths below PATH."""
        yield from page_routes(
            PATH, "label.html", ("label.css", "label.js", "label_grid.js", "strings.json")
        )
        yield Route(f"{PATH}queue", "GET", self._list, about=_QUEUE)
        yield Route(f"{PATH}pictures/{{name}}", "GET", self._picture, about=_PICTURE)
        yield Route(f"{PATH}label", "POST", self._label, "login", _LABEL)
        yield Route(f"{PATH}undo", "POST", self._undo, "login", _UNDO)
        yield Route(f"{PATH}overrule", "POST", self._overrule, "login", _OVERRULE)

    @property
    def classes(self) -> list[str]:
        """What images can be labelled as, as far as was known at the last look into the folder.

        Others can see and change the folder; it may be large, slow or away. So it is looked at in
        the queue's thread, and no page waits for it.
        """
        if not self._is_looking and self._clock() - self._looked_at > LOOK_AGAIN:
            self._is_looking = True
            self._thread.submit(self._look)
        known = self._pipeline.model.manifest.classes
        return [*known, *(name for name in self._folders if name not in known)]

    def _look(self) -> None:
        with contextlib.suppress(EdgeNodeError):  # it is away: who labels an image is told
            self._folders = self._queue.folders()
        self._looked_at = self._clock()
        self._is_looking = False

    @property
    def is_damaged(self) -> bool:
        """Whether the history of labels was damaged while the line ran: nobody can label."""
        return self._queue.is_damaged

    @property
    def field(self) -> FieldAccuracy | None:
        """The accuracy in service of the model that is served;
        None until an image that tells it is labelled.
        """
        measured, found = self._field
        if measured != (digest := self._pipeline.model.digest):
            self._field = digest, None
            self._thread.submit(self._measure)
            return None
        return found

    def readings(self) -> Iterator[Reading]:
        """The accuracy in service, for Prometheus."""
        if (found := self.field) is None:
            return
        measured = found.accuracy
        for name, text, value in (
            (
                "accuracy_ratio",
                "Share of verdicts on images kept at random that people confirmed",
                measured.share,
            ),
            ("accuracy_low_ratio", "Lower end of its 95 % interval", measured.low),
            ("accuracy_high_ratio", "Upper end of its 95 % interval", measured.high),
            ("labelled", "Images that it rests on", measured.images),
            (
                "promise_missed",
                "1 while that is less than held-out images promise",
                found.promise == "missed",
            ),
        ):
            yield Reading(GaugeMetricFamily, f"service_{name}", text, value)

    def _measure(self) -> None:
        model = self._pipeline.model
        pipeline = self._pipeline
        promised = held_out_performance(model.manifest, pipeline.view, pipeline.prior)
        waiting = promised.accuracy if promised else None
        found = judge_field(*self._queue.sample(model.digest), waiting)
        self._field = model.digest, found

    def close(self) -> None:
        """Finish what is being done."""
        self._drawing.shutdown()
        self._thread.shutdown()

    async def _list(self, request: Request) -> Response:
        """The images that wait, the most instructive first; with `?count=1` only how many."""
        is_counted = query(request, "count", "") == "1"

        def encode() -> bytes:
            waiting = self._queue.waiting()
            found: WaitingImages = {"line": self._line, "waiting": len(waiting)}
            if not is_counted:
                self._look()
                found["classes"] = self.classes
                found["images"] = waiting
            return msgspec.json.encode(found)

        content = await self._do(encode)
        return Response(content, headers=_FRESH, media_type="application/json")

    async def _picture(self, request: Request) -> Response:
        side = _SIDES.get(query(request, "size", "large"))
        if side is None:
            raise RequestError("there is no picture of that size", f"ask for {' or '.join(_SIDES)}")
        if self._pictures >= MOST_PICTURES:
            raise RequestError(
                f"{self._pictures} pictures are asked for already",
                "ask again later",
                503,
                {"retry-after": "1"},
            )
        self._pictures += 1
        try:
            draw = partial(self._queue.picture, request.path_params["name"], side)
            picture = await self._do(draw, 404, self._drawing)
        finally:
            self._pictures -= 1
        return Response(picture, media_type="image/jpeg", headers=_SAME_FOR_EVER)

    async def _label(self, request: Request) -> Response:
        given = await read_json(request, Labels)
        await self._do(self._look)
        if given.label is not None and given.label not in self.classes:
            raise RequestError(
                f"there is no class {given.label!r}",
                f"take one of {', '.join(self.classes)}, or make its folder first",
            )
        done = await self._do(
            partial(self._queue.label, given.images, given.label, user_of(request).name)
        )
        self._thread.submit(self._measure)
        gone = [name for name in dict.fromkeys(given.images) if name not in done]
        answer: LabelledCount = {"labelled": len(done), "gone": gone}
        return json_response(answer)

    async def _undo(self, request: Request) -> Response:
        undone = await self._do(partial(self._queue.undo, user_of(request).name))
        self._thread.submit(self._measure)
        return json_response(
            {"label": undone.label, "images": [image.kept for image in undone.images]}
        )

    async def _overrule(self, request: Request) -> Response:
        given = await read_json(request, Overruled)
        inspection = self._recent.find(given.id)
        if inspection is None:
            raise RequestError(
                "this image is not held any more", "hold the next one before you overrule it", 404
            )
        return json_response({"kept": await self._do(partial(self._queue.overrule, inspection))})

    async def _do(
        self, work: Callable[[], T], status: int = 409, thread: ThreadPoolExecutor | None = None
    ) -> T:
        """Have the queue do something; what it refuses is the client's matter,
        and has this status.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(thread or self._thread, work)
        except UsageError as error:
            raise RequestError(error.what, error.remedy, status) from error
