"""The inspection pipeline of a line: each frame decoded, cut into tiles,
classified in one worker thread, handed on.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import EdgeNodeError
from edge.inference.class_prior import Prior, is_taught, reweight
from edge.inference.image_decoding import (
    PATIENCE,
    DepthWatch,
    ImageError,
    Photo,
    SlowImageError,
    decode_image,
    read_image,
)
from edge.inference.outcomes import Failure, Outcome, Verdict, current_time, new_id
from edge.inference.part_decision import check_no_defect_class, decide
from edge.inference.predictor import PROGRESS, Outputs
from edge.inference.served_model import Model
from edge.inference.tiling import TiledFrame, View, cut_tiles

CRASHES = 2  # of the line, after which a frame that was in hand at each is not inspected any more
DECODING = 2.0  # seconds of the processor's time that decoding an image may take
_DECODERS = 2  # threads; Pillow works without the interpreter's lock
_EXTRAS = ("opinions", "features")  # outputs that inspecting a frame needs besides probabilities

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class BrokenModelError(EdgeNodeError):
    """The model cannot compute."""


class Frame(NamedTuple):
    """An image to inspect: the name by which people know it, its content,
    and where it came from.
    """

    name: str
    # an image file's bytes or path, or a camera's frame, [height, width, 3] RGB
    data: bytes | Path | NDArray[np.uint8]
    source: str = ""
    crashes: int = 0  # of the line, at which it was in hand


class Source(Protocol):
    """Where frames come from, besides HTTP."""

    name: str

    def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        """Each new frame once, in order; ends soon after `stop` is set,
        or when there will be no more.

        OSError or EdgeNodeError when the source fails: it is called again after a while.
        """

    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:
        """Record that a frame's outcome has been accepted: the frame need not be brought again."""


class OutcomeConsumer(Protocol):
    """Destination of a pipeline's outcomes: in the daemon, the dispatcher to the sinks."""

    def put(self, outcome: Outcome) -> None:
        """Accept an outcome within a millisecond; never raises."""


class NullConsumer:
    """Discards outcomes, for callers that use what the pipeline returns."""

    def put(self, outcome: Outcome) -> None:
        """Discard it."""


class Inspection(NamedTuple):
    """A classified frame with everything that led to its verdict,
    as the pipeline's monitors get it.
    """

    model: Model
    frame: Frame
    tiled: TiledFrame
    outputs: Outputs  # of the graph, as they are
    probabilities: NDArray[np.float32]  # [tiles, classes], under the line's prior
    verdict: Verdict
    tile: int  # index into `tiled` and `outputs`: the tile that decided
    arrived_at: float  # by time.perf_counter
    decoding_seconds: float
    inference_seconds: float


class Monitor(Protocol):
    """May amend a verdict before it is handed on: doubts it, keeps the image, counts.

    Runs in the worker thread.
    """

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict, or a changed copy of it; must not wait for anything."""


class Pipeline:
    """Inspects frames one after another; neither a bad frame nor a failing monitor stops it."""

    def __init__(
        self,
        model: Model,
        outcomes: OutcomeConsumer,
        view: View | None = None,
        monitors: Sequence[Monitor] = (),
        prior: Prior | None = None,
    ) -> None:
        self.model = model  # assign another one to serve it from the next frame on
        self.view = view or View()
        self.prior = prior or Prior()
        check_class_names(self.view, self.prior, model.manifest.classes)
        self.monitors = tuple(monitors)
        self.outcomes = outcomes
        self.draining = False  # no new work is accepted; frames in progress are finished
        self.stalled = False  # a thread has not answered of late
        self.inspected = 0  # frames, failures included
        self.on_model_error: Callable[[Model, Exception], None] = _log_model_error
        self.on_model_success: Callable[[Model], None] = lambda _: None
        self._decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="decode")
        self._slow_decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="slow decode")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._depth = DepthWatch()
        # Decoded frames are large: others wait as files. Those that can take long keep nobody but
        # each other waiting.
        self._room = asyncio.Semaphore(_DECODERS + 1)
        self._slow_room = asyncio.Semaphore(_DECODERS)

    async def classify(
        self, frame: Frame, after: Awaitable[None] | None = None
    ) -> Verdict | Failure:
        """The outcome of a frame, decoded while `after` is awaited;
        `outcomes` has it before the caller does.
        """
        async with self.inspect(frame, after) as found:
            return found if isinstance(found, Failure) else found.verdict

    @contextlib.asynccontextmanager
    async def inspect(
        self, frame: Frame, after: Awaitable[None] | None = None
    ) -> AsyncIterator[Inspection | Failure]:
        """As `classify`, with the whole inspection;
        the decoded frame takes up room until the context is left.

        `after` waits for frames that came before this one: they get room first.
        """
        loop = asyncio.get_running_loop()
        arrived_at = time.perf_counter()
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self._room)
            try:
                prepared = await loop.run_in_executor(
                    self._decoders, self._prepare, frame, arrived_at, 0.0
                )
            except SlowImageError:
                await held.aclose()
                await held.enter_async_context(self._slow_room)
                prepared = await loop.run_in_executor(
                    self._slow_decoders, self._prepare, frame, arrived_at, DECODING
                )
            if after:
                await after
            yield await loop.run_in_executor(self._worker, self._inspect, prepared)

    async def infer(
        self, model: Model, images: NDArray[np.uint8], extras: Sequence[str] = ()
    ) -> Outputs:
        """The graph's outputs for a program's images, uint8 [N, size, size, 3],
        under no prior of the line.

        No verdict results, no monitor is told.

        `model` is one that this pipeline serves, or served when the request arrived. ValueError for
        any other shape or type, BrokenModelError when the model cannot compute.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._worker, self._infer, model, images, extras
        )

    async def decode(self, content: bytes, size: int, name: str) -> NDArray[np.uint8]:
        """`decode_image` for the model, within the time that a frame has."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._decoders, decode_image, content, size, name, 0.0
            )
        except SlowImageError:
            return await loop.run_in_executor(
                self._slow_decoders, decode_image, content, size, name, DECODING
            )

    async def run_in_decoder(self, function: Callable[[T], R], argument: T) -> R:
        """Call a slow function in a decoder thread."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function, argument)

    async def ping(self) -> None:
        """Return when a decoder and the worker have accepted new work: they are alive,
        and done with earlier work.
        """
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(loop.run_in_executor(each, int) for each in (self._decoders, self._worker))
        )

    def close(self) -> None:
        """Finish the frames in progress."""
        for each in (self._decoders, self._slow_decoders, self._worker):
            each.shutdown()

    def inspect_sync(self, frame: Frame) -> Inspection | Failure:
        """Inspect a frame in the calling thread."""
        return self._inspect(self._prepare(frame, time.perf_counter(), PATIENCE))

    def _prepare(self, frame: Frame, arrived_at: float, seconds: float) -> "_Prepared":
        """Decode a frame and cut it, in so many seconds as `read_image` takes them."""
        start = time.perf_counter()
        model = self.model
        view = self.view
        prior = self.prior
        try:
            photo = _decode(frame, seconds)
            self._depth.look(photo)
            found: TiledFrame | ImageError = cut_tiles(
                photo, view, model.manifest.input.size, frame.name
            )
        except ImageError as error:
            found = error
        except SlowImageError:
            raise
        except Exception as error:  # out of memory, for example: that costs one image, not the line
            _log.exception("the image %s cannot be prepared", frame.name)
            found = ImageError(f"{frame.name} cannot be prepared: {error!r}", "see the line's log")
        PROGRESS.step()
        return _Prepared(frame, found, model, view, prior, arrived_at, time.perf_counter() - start)

    def _inspect(self, prepared: "_Prepared") -> Inspection | Failure:
        found = self._classify(prepared)
        outcome = found if isinstance(found, Failure) else found.verdict
        self.outcomes.put(outcome)
        self.inspected += 1
        return found

    def _classify(self, prepared: "_Prepared", *, may_retry: bool = True) -> Inspection | Failure:
        frame, found, model, view, prior, arrived_at, decoding_seconds = prepared
        if isinstance(found, ImageError):
            return _failure(frame, found.what, found.remedy)
        start = time.perf_counter()
        try:
            outputs = self._run(model, found.pixels, _EXTRAS)
        except Exception as error:
            # it was exchanged meanwhile, perhaps for this very failure
            if may_retry and model is not self.model:
                return self._classify(self._prepare(frame, arrived_at, DECODING), may_retry=False)
            return _failure(
                frame, f"the model failed on {frame.name}: {error}", "see the line's log"
            )
        inference_seconds = time.perf_counter() - start
        manifest = model.manifest
        probabilities = reweight(
            outputs.probabilities, prior.weights(manifest.classes, manifest.trained)
        )
        decision = decide(probabilities, found.boxes, manifest.classes, view)
        row = probabilities[decision.tile].tolist()
        verdict = Verdict(
            image=frame.name,
            label=decision.label,
            confidence=row[manifest.classes.index(decision.label)],
            probabilities=dict(zip(manifest.classes, row, strict=True)),
            bundle=manifest.id,
            milliseconds=round(1000 * (decoding_seconds + time.perf_counter() - start), 3),
            time=current_time(),
            source=frame.source,
            model=model.digest,
            defect=decision.defect,
            taught=is_taught(decision.label, manifest.trained),
            tiles=decision.tiles,
            id=new_id(),
        )
        inspection = Inspection(
            model,
            frame,
            found,
            outputs,
            probabilities,
            verdict,
            decision.tile,
            arrived_at,
            decoding_seconds,
            inference_seconds,
        )
        for monitor in self.monitors:
            inspection = inspection._replace(verdict=self._amend(monitor, inspection))
        return inspection

    def _amend(self, monitor: Monitor, inspection: Inspection) -> Verdict:
        try:
            return monitor(inspection)
        except Exception as error:  # outputs that it did not expect: the verdict stands as it was
            _log.exception("%s failed on %s", type(monitor).__name__, inspection.frame.name)
            self.on_model_error(inspection.model, error)
            return inspection.verdict

    def _infer(self, model: Model, images: NDArray[np.uint8], extras: Sequence[str]) -> Outputs:
        try:
            return self._run(model, images, extras)
        except ValueError:
            raise
        except Exception as error:
            raise BrokenModelError(f"the model failed: {error}", "see the line's log") from error

    def _run(self, model: Model, images: NDArray[np.uint8], extras: Sequence[str]) -> Outputs:
        try:
            outputs = model.predictor.run_one_by_one(images, extras)
            if not np.isfinite(outputs.probabilities).all():
                raise ArithmeticError("its probabilities are no numbers")
        except ValueError:  # images that no model accepts
            raise
        except Exception as error:  # onnxruntime's own: out of memory, a broken kernel
            self.on_model_error(model, error)
            raise
        self.on_model_success(model)
        return outputs


class _Prepared(NamedTuple):
    """A decoded frame, with model, view and prior at that time:
    it is inspected with these, whatever changes.
    """

    frame: Frame
    found: TiledFrame | ImageError
    model: Model
    view: View
    prior: Prior
    arrived_at: float  # by time.perf_counter
    decoding_seconds: float


def check_class_names(view: View, prior: Prior, classes: Sequence[str]) -> None:
    """UsageError when the settings name a class that a model does not have."""
    check_no_defect_class(view, classes)
    prior.check_classes(classes)


def _decode(frame: Frame, seconds: float) -> Photo:
    if frame.crashes >= CRASHES:
        raise ImageError(
            f"{frame.name} was in hand when the line crashed, {frame.crashes} times: it is set "
            "aside",
            "see the line's log for why; send or store it anew to have it inspected again",
        )
    if isinstance(frame.data, np.ndarray):
        return Photo.from_array(frame.data)
    return read_image(frame.data, frame.name, seconds)


def _failure(frame: Frame, error: str, remedy: str) -> Failure:
    return Failure(
        image=frame.name,
        error=error,
        remedy=remedy,
        time=current_time(),
        source=frame.source,
        id=new_id(),
    )


def _log_model_error(model: Model, error: Exception) -> None:
    _log.error("the model %s cannot compute: %s", model.manifest.id, error)
