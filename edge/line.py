"""What happens to one image on the line: judged in one worker thread, the outcome told to every sink."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from broker_config.errors import EdgeNodeError
from edge import bundle
from edge.images import ImageError, decode
from edge.predictor import Predictor

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

    def __init__(self, predictor: Predictor, sinks: Sequence[Sink]) -> None:
        self.manifest = predictor.manifest
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


def judge_files(bundle_folder: Path, files: Iterable[Path], threads: int = 0) -> Iterator[Verdict | Failure]:
    """Judge image files with a bundle, one after another; BundleError when the bundle cannot be used."""
    predictor = Predictor(bundle.read(bundle_folder), threads)
    predictor.self_test()
    line = Line(predictor, [])
    for file in files:
        yield line.judge_here(Image(str(file), file))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
