"""What happens to one image on the line: judged in one worker thread, the outcome told to every sink."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from broker_config.errors import EdgeNodeError
from edge import bundle
from edge.expiry import UNCHECKED, Ends, tell
from edge.images import ImageError, decode
from edge.predictor import Predictor

if TYPE_CHECKING:
    from edge.verify import Guard  # only a line with a guard takes the time to load cryptography

_log = logging.getLogger(__name__)


class Verdict(Struct, frozen=True, kw_only=True, tag_field="type"):
    """An image was judged."""

    image: str
    label: str
    confidence: float
    probabilities: dict[str, float]
    bundle: str  # NODE@ROUND
    milliseconds: float  # decoding and predicting, without waiting
    time: str  # ISO 8601, UTC


class Failure(Struct, frozen=True, kw_only=True, tag_field="type"):
    """An image could not be judged."""

    image: str
    error: str
    remedy: str
    time: str  # ISO 8601, UTC


class Image(NamedTuple):
    """An image to judge: the name by which people know it, and the file's bytes or path."""

    name: str
    data: bytes | Path


class Source(Protocol):
    """Where images come from, besides HTTP."""

    def images(self, stop: asyncio.Event) -> AsyncIterator[Image]:
        """Each new image once; ends soon after `stop` is set."""


class Sink(Protocol):
    """Where verdicts go. Used by one thread at a time."""

    def send(self, outcome: Verdict | Failure) -> None:
        """Pass on an outcome without waiting for its receiver; OSError or EdgeNodeError when it is lost."""

    def close(self) -> None:
        """Pass on what is still held back, within seconds."""


class Line:
    """Judges images one after another; neither a bad image nor a failing sink stops it."""

    def __init__(self, predictor: Predictor, sinks: Sequence[Sink], ends: Ends = UNCHECKED) -> None:
        self.manifest = predictor.manifest
        self.ends = ends
        self.draining = False  # no new work is taken; what is in hand is finished
        self._predictor = predictor
        self._sinks = sinks
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="line")

    async def judge(self, image: Image) -> Verdict | Failure:
        """Judge an image when those before it are done; the sinks have the outcome before the caller does."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self.judge_here, image)

    def close(self) -> None:
        """Finish what is in hand."""
        self._worker.shutdown()

    def judge_here(self, image: Image) -> Verdict | Failure:
        """Judge an image in this thread."""
        try:
            outcome: Verdict | Failure = self._verdict(image)
        except ImageError as error:
            outcome = Failure(image=image.name, error=error.what, remedy=error.remedy, time=_now())
        for sink in self._sinks:
            try:
                sink.send(outcome)
            except (OSError, EdgeNodeError) as error:
                _log.error("the verdict on %s is lost: %s", image.name, error)
        return outcome

    def _verdict(self, image: Image) -> Verdict:
        start = time.perf_counter()
        pixels = decode(image.data, self.manifest.input.size, image.name)
        prediction = self._predictor.predict(pixels[None])[0]
        return Verdict(
            image=image.name,
            label=prediction.label,
            confidence=prediction.confidence,
            probabilities=dict(zip(self.manifest.classes, prediction.probabilities, strict=True)),
            bundle=self.manifest.id,
            milliseconds=round(1000 * (time.perf_counter() - start), 3),
            time=_now(),
        )


def load(folder: Path, guard: "Guard | None" = None, threads: int = 0) -> tuple[Predictor, Ends]:
    """Load and try a bundle that `guard` admits, and tell when it ends; without a guard no signature is looked at.

    Raises EdgeNodeError when the bundle cannot be used; with a guard, as `Guard.admitted` does.
    """
    if guard is None:
        if (folder / bundle.SIGNATURE).exists():
            _log.warning("%s is signed, but its signature is not checked without --trust", folder)
        return _tried(bundle.read(folder), threads), UNCHECKED
    with guard.admitted(folder) as found:
        if others := bundle.unlisted(folder, found.bundle.manifest):
            _log.warning(
                "%s holds more than the bundle (%r, %d in all): nobody signed that, nothing uses it",
                folder,
                others[0],
                len(others),
            )
        return _tried(found.bundle, threads), found.ends


def _tried(found: bundle.Bundle, threads: int) -> Predictor:
    predictor = Predictor(found, threads)
    predictor.self_test()
    return predictor


def judge_files(
    bundle_folder: Path, files: Iterable[Path], guard: "Guard | None" = None, threads: int = 0
) -> Iterator[Verdict | Failure]:
    """Judge image files with a bundle, one after another; raises as `load` does."""
    predictor, ends = load(bundle_folder, guard, threads)
    tell(ends)
    line = Line(predictor, [], ends)
    for file in files:
        yield line.judge_here(Image(str(file), file))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
