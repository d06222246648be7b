"""What a source brings is judged; a source that fails is told, and tried again."""

import asyncio
import contextlib
import logging

from broker_config.protocol.errors import EdgeNodeError
from edge.inference.pipeline import Frame, Pipeline, Source
from edge.inference.verdict import Notice, current_time, new_id

FIRST, LONGEST = 1.0, 30.0  # seconds until a source that fails is tried again: at first, at most

_log = logging.getLogger(__name__)


async def feed(pipeline: Pipeline, source: Source, stop: asyncio.Event) -> None:
    """Judge all that a source brings, in its order, until it ends or `stop` is set."""
    outage = _Outage(pipeline, source)
    while not stop.is_set():
        try:
            await _judge_all(pipeline, source, stop, outage)
        except (OSError, EdgeNodeError) as error:
            outage.goes_on(error)
        else:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), outage.wait)
    if not stop.is_set():
        _log.info("%s has ended", source.name)


async def _judge_all(pipeline: Pipeline, source: Source, stop: asyncio.Event, outage: "_Outage") -> None:
    """The next frame is decoded while one is judged; more are not taken."""
    last: asyncio.Task[None] | None = None
    try:
        async with contextlib.aclosing(source.frames(stop)) as frames:
            async for frame in frames:
                outage.ends()
                before, last = last, asyncio.create_task(_judge(pipeline, source, frame, last))
                if before:
                    await before
    finally:
        if last:
            await last


async def _judge(pipeline: Pipeline, source: Source, frame: Frame, before: asyncio.Task[None] | None) -> None:
    source.done(frame, await pipeline.classify(frame, before))


class _Outage:
    """What people are told of a source that fails: that it does, why when that changes, and when it is over."""

    def __init__(self, pipeline: Pipeline, source: Source) -> None:
        self.wait = FIRST  # seconds until the next try
        self._pipeline = pipeline
        self._source = source
        self._told = ""

    def goes_on(self, error: OSError | EdgeNodeError) -> None:
        """It has failed again."""
        if self._told:
            self.wait = min(2 * self.wait, LONGEST)
        reason = f"{error.what}; {error.remedy}" if isinstance(error, EdgeNodeError) else str(error)
        if self._told != reason:
            self._told = reason
            self._say("%s brings no images, and is tried again: %s", self._source.name, reason)

    def ends(self) -> None:
        """It has brought a frame."""
        if self._told:
            self._say("%s brings images again", self._source.name)
        self._told, self.wait = "", FIRST

    def _say(self, text: str, *values: object) -> None:
        _log.warning(text, *values)
        details: dict[str, float | str] = {"source": self._source.name}
        notice = Notice(kind="source", text=text % values, time=current_time(), details=details, id=new_id())
        self._pipeline.outbox.put(notice)
