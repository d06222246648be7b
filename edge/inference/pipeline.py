"""What happens to one frame on the line: decoded, judged in one worker thread, the outcome handed on."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import EdgeNodeError
from edge.bundle import bundle_format
from edge.bundle.expiry import UNCHECKED, Ends
from edge.inference import native_memory
from edge.inference.decision import check, decide
from edge.inference.image_decoding import ImageError, Photo, read
from edge.inference.predictor import Outputs, Predictor
from edge.inference.tile_inference import PROGRESS, look
from edge.inference.tiling import Cut, View, cut
from edge.inference.verdict import Failure, Outcome, Verdict, fresh_id, now

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier  # only a line with a verifier takes the time to load cryptography

_DECODERS = 2  # threads; Pillow works without the interpreter's lock
_EXTRAS = ("opinions", "features")  # what judging a frame needs besides probabilities

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class BrokenModelError(EdgeNodeError):
    """The model cannot compute."""


class Frame(NamedTuple):
    """An image to judge: the name by which people know it, an image file's bytes or path, and where it came from."""

    name: str
    data: bytes | Path | NDArray[np.uint8]  # an array is a camera's frame, [height, width, 3] RGB
    source: str = ""


class Source(Protocol):
    """Where frames come from, besides HTTP."""

    name: str

    def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        """Each new frame once, in order; ends soon after `stop` is set, or when there will be no more.

        OSError or EdgeNodeError when the source fails: it is called again after a while.
        """

    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:
        """The outbox has the outcome of a frame: it need not be brought again."""


class Outbox(Protocol):
    """Where outcomes go."""

    def put(self, outcome: Outcome) -> None:
        """Take an outcome over, within a millisecond; never raises."""


class Model(NamedTuple):
    """What a line serves at one moment. Exchanged as a whole, so no answer mixes two models."""

    predictor: Predictor
    ends: Ends = UNCHECKED
    digest: str = ""  # of the manifest, the first 12 hexadecimal digits

    @property
    def manifest(self) -> bundle_format.Manifest:
        """The bundle's manifest."""
        return self.predictor.manifest


class Inspection(NamedTuple):
    """A frame that was judged, as those who watch the line get it."""

    model: Model
    frame: Frame
    cut: Cut
    outputs: Outputs
    verdict: Verdict
    tile: int  # of `cut` and `outputs`: the one that decided
    arrival: float  # when the frame came, by time.perf_counter
    decoding: float  # seconds
    inference: float  # seconds


class Monitor(Protocol):
    """Has a say in a verdict before it is handed on: doubts it, keeps the image, counts. In the worker thread."""

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict, or a changed copy of it; must not wait for anything."""


class Pipeline:
    """Judges frames one after another; neither a bad frame nor a failing receiver stops it."""

    def __init__(
        self, model: Model, outbox: Outbox, view: View | None = None, monitors: Sequence[Monitor] = ()
    ) -> None:
        self.model = model  # assign another one to serve it from the next frame on
        self.view = view or View()
        check(self.view, model.manifest.classes)
        self.monitors = tuple(monitors)
        self.outbox = outbox
        self.draining = False  # no new work is taken; what is in hand is finished
        self.judged = 0  # frames, also those that could not be
        self.broken: Callable[[Model, Exception], None] = _tell_broken  # told when a model cannot compute
        self.sound: Callable[[Model], None] = _ignore  # told when it could
        self._decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="decode")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="line")
        self._room = asyncio.Semaphore(_DECODERS + 1)  # decoded frames are large: others wait as files

    async def judge(self, frame: Frame, after: Awaitable[None] | None = None) -> Verdict | Failure:
        """Judge a frame, decoded while `after` is awaited; the outbox has the outcome before the caller does."""
        async with self.see(frame, after) as found:
            return found if isinstance(found, Failure) else found.verdict

    @contextlib.asynccontextmanager
    async def see(self, frame: Frame, after: Awaitable[None] | None = None) -> AsyncIterator[Inspection | Failure]:
        """As `judge`, for those who want to see what was judged: decoded, it takes up room until the context is left.

        `after` waits for frames that came before this one: they get room first.
        """
        loop = asyncio.get_running_loop()
        async with self._room:
            prepared = await loop.run_in_executor(self._decoders, self._prepare, frame, time.perf_counter())
            if after:
                await after
            yield await loop.run_in_executor(self._worker, self._see, prepared)

    async def infer(self, model: Model, images: NDArray[np.uint8], extras: Sequence[str] = ()) -> Outputs:
        """Answer a program's question: uint8 [N, size, size, 3]. No part is judged, and nobody else hears of it.

        `model` is one that this line serves, or served when the question was asked. ValueError for any other shape
        or type, BrokenModelError when the model cannot compute.
        """
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._infer, model, images, extras)

    async def decoding(self, function: Callable[[T], R], argument: T) -> R:
        """Call a function that takes long where frames are decoded."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function, argument)

    async def answer(self) -> None:
        """Return when a decoder and the worker have taken up something new: they are alive, and done with what was."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(each, int) for each in (self._decoders, self._worker)))

    def close(self) -> None:
        """Finish what is in hand."""
        self._decoders.shutdown()
        self._worker.shutdown()

    def see_here(self, frame: Frame) -> Inspection | Failure:
        """Judge a frame in this thread."""
        return self._see(self._prepare(frame, time.perf_counter()))

    def _prepare(self, frame: Frame, arrival: float) -> "_Prepared":
        start = time.perf_counter()
        model, view = self.model, self.view
        try:
            found: Cut | ImageError = cut(_photo(frame), view, model.manifest.input.size, frame.name)
        except ImageError as error:
            found = error
        except Exception as error:  # for lack of memory, for example: that is one image's fault, not the line's end
            _log.exception("the image %s cannot be prepared", frame.name)
            found = ImageError(f"{frame.name} cannot be prepared: {error!r}", "see the line's log")
        PROGRESS.step()
        return _Prepared(frame, found, model, view, arrival, time.perf_counter() - start)

    def _see(self, prepared: "_Prepared") -> Inspection | Failure:
        found = self._look(prepared)
        self.outbox.put(found if isinstance(found, Failure) else found.verdict)
        self.judged += 1
        return found

    def _look(self, prepared: "_Prepared", *, again: bool = True) -> Inspection | Failure:
        frame, found, model, view, arrival, seconds = prepared
        if isinstance(found, ImageError):
            return _failure(frame, found.what, found.remedy)
        start = time.perf_counter()
        try:
            outputs = self._run(model, found.pixels, _EXTRAS)
        except Exception as error:
            if again and model is not self.model:  # it was exchanged meanwhile, perhaps for this very failure
                return self._look(self._prepare(frame, arrival), again=False)
            return _failure(frame, f"the model failed on {frame.name}: {error}", "see the line's log")
        inference = time.perf_counter() - start
        manifest = model.manifest
        decision = decide(outputs.probabilities, found.boxes, manifest.classes, view)
        row = outputs.probabilities[decision.tile].tolist()
        verdict = Verdict(
            image=frame.name,
            label=decision.label,
            confidence=row[manifest.classes.index(decision.label)],
            probabilities=dict(zip(manifest.classes, row, strict=True)),
            bundle=manifest.id,
            milliseconds=round(1000 * (seconds + time.perf_counter() - start), 3),
            time=now(),
            source=frame.source,
            model=model.digest,
            defect=decision.defect,
            tiles=decision.tiles,
            id=fresh_id(),
        )
        inspection = Inspection(model, frame, found, outputs, verdict, decision.tile, arrival, seconds, inference)
        for monitor in self.monitors:
            inspection = inspection._replace(verdict=self._watched(monitor, inspection))
        return inspection

    def _watched(self, monitor: Monitor, inspection: Inspection) -> Verdict:
        try:
            return monitor(inspection)
        except Exception as error:  # outputs that it did not reckon with: the verdict stands without its say
            _log.exception("%s failed on %s", type(monitor).__name__, inspection.frame.name)
            self.broken(inspection.model, error)
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
            outputs = look(model.predictor, images, extras)
            if not np.isfinite(outputs.probabilities).all():
                raise ArithmeticError("its probabilities are no numbers")
        except ValueError:  # images that no model can take
            raise
        except Exception as error:  # onnxruntime's own: out of memory, a broken kernel
            self.broken(model, error)
            raise
        self.sound(model)
        return outputs


class _Prepared(NamedTuple):
    """A frame that was decoded, and what was in force then: it is judged by that, whatever comes in between."""

    frame: Frame
    found: Cut | ImageError
    model: Model
    view: View
    arrival: float  # by time.perf_counter
    seconds: float


def _photo(frame: Frame) -> Photo:
    if isinstance(frame.data, np.ndarray):
        return Photo.of(frame.data)
    return read(frame.data, frame.name)


def _failure(frame: Frame, error: str, remedy: str) -> Failure:
    return Failure(image=frame.name, error=error, remedy=remedy, time=now(), source=frame.source, id=fresh_id())


def _tell_broken(model: Model, error: Exception) -> None:
    _log.error("the model %s cannot compute: %s", model.manifest.id, error)


def _ignore(model: Model) -> None:
    pass


def load(folder: Path, verifier: "Verifier | None" = None, threads: int = 0) -> Model:
    """Load and try a bundle that `verifier` admits; without a verifier no signature is looked at.

    Raises EdgeNodeError when the bundle cannot be used; with a verifier, as `Verifier.admitted` does.
    """
    if verifier is None:
        if (folder / bundle_format.SIGNATURE).exists():
            _log.warning("%s is signed, but its signature is not checked without --trust", folder)
        return tried(bundle_format.read(folder), threads)
    with verifier.admitted(folder) as found:
        if others := bundle_format.unlisted(folder, found.bundle.manifest):
            _log.warning(
                "%s holds more than the bundle (%r, %d in all): nobody signed that, nothing uses it",
                folder,
                others[0],
                len(others),
            )
        return tried(found.bundle, threads, found.ends)


def tried(found: bundle_format.Bundle, threads: int, ends: Ends = UNCHECKED) -> Model:
    """Load a bundle that was admitted; BundleError when it does not do what it promises."""
    predictor = Predictor(found, threads)
    predictor.self_test()
    native_memory.tidy()
    return Model(predictor, ends, found.digest[:12])


class NullOutbox:
    """The outbox of those who look at the outcomes themselves."""

    def put(self, outcome: Outcome) -> None:
        """Let it go."""
