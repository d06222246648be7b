"""Runner of a source: its images are inspected in order;
a source that fails is reported and opened again.
"""

import asyncio
import contextlib
import logging

from broker_config.protocol.errors import EdgeNodeError
from edge.inference.outcomes import Notice, current_time, new_id
from edge.inference.pipeline import Frame, Pipeline, Source

# seconds before a failed source is opened again: at first, at most
FIRST = 1.0
LONGEST = 30.0

_log = logging.getLogger(__name__)


async def run_source(pipeline: Pipeline, source: Source, stop: asyncio.Event) -> None:
    """Inspect all images of a source, in its order, until it ends or `stop` is set."""
    outage = _Outage(pipeline, source)
    while not stop.is_set():
        try:
            await _inspect_all(pipeline, source, stop, outage)
        except (OSError, EdgeNodeError) as error:
            outage.record(error)
        else:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), outage.pause)
    if not stop.is_set():
        _log.info("%s has ended", source.name)


async def _inspect_all(
    pipeline: Pipeline, source: Source, stop: asyncio.Event, outage: "_Outage"
) -> None:
    """Decode the next frame while one is inspected, but no more than that;
    one that was in hand at a crash, alone.
    """
    last: asyncio.Task[None] | None = None
    try:
        async with contextlib.aclosing(source.frames(stop)) as frames:
            async for frame in frames:
                outage.end()
                before = last
                last = asyncio.create_task(_inspect(pipeline, source, frame, last))
                if before:
                    await before
                if frame.crashes:
                    await last
    finally:
        if last:
            await last


async def _inspect(
    pipeline: Pipeline, source: Source, frame: Frame, before: asyncio.Task[None] | None
) -> None:
    source.done(frame, await pipeline.classify(frame, before))


class _Outage:
    """Reports of a source that fails: the first failure, each new reason, and the recovery."""

    def __init__(self, pipeline: Pipeline, source: Source) -> None:
        self.pause = FIRST  # seconds until the next attempt
        self._pipeline = pipeline
        self._source = source
        self._reported = ""

    def record(self, error: OSError | EdgeNodeError) -> None:
        """The source has failed, perhaps again."""
        if self._reported:
            self.pause = min(2 * self.pause, LONGEST)
        reason = f"{error.what}; {error.remedy}" if isinstance(error, EdgeNodeError) else str(error)
        if self._reported != reason:
            self._reported = reason
            self._warn("%s brings no images, and is tried again: %s", self._source.name, reason)

    def end(self) -> None:
        """The source has brought a frame."""
        if self._reported:
            self._warn("%s brings images again", self._source.name)
        self._reported = ""
        self.pause = FIRST

    def _warn(self, text: str, *values: object) -> None:
        _log.warning(text, *values)
        details: dict[str, float | str] = {"source": self._source.name}
        notice = Notice(
            kind="source", text=text % values, time=current_time(), details=details, id=new_id()
        )
        self._pipeline.outcomes.put(notice)
