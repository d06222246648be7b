"""What of a line is exchanged while it runs: view, sources, sinks, log. No frame and no outcome is lost by it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from broker_config.errors import EdgeNodeError
from edge import assembly, settings
from edge.line import Frame, Line, Prepared, Source
from edge.operation.logs import Log
from edge.settings import Settings
from edge.verdict import Outcome

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where outcomes go. Used by one thread at a time."""

    def send(self, outcome: Outcome) -> None:
        """Pass on an outcome without waiting for its receiver; OSError or EdgeNodeError when it is lost."""

    def close(self) -> None:
        """Pass on what is still held back, within seconds."""


class Immediate:
    """Hands each outcome to every sink at once."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def put(self, outcome: Outcome) -> None:
        """Tell them all, and go on when one fails."""
        for sink in self._sinks:
            try:
                sink.send(outcome)
            except (OSError, EdgeNodeError) as error:
                _log.error("the outcome %s is lost: %s", outcome.id, error)


class _Opened(NamedTuple):
    """A sink that takes outcomes."""

    wanted: settings.Sink
    sink: Sink
    closing: contextlib.ExitStack


class _Feed(NamedTuple):
    """A source whose frames are judged."""

    wanted: settings.Source
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def end(self) -> None:
        """Judge what it has brought."""
        self.stop.set()
        await self.task


class Parts:
    """A line's parts, as its settings want them. `ended` is told when a source brings no more, or fails."""

    def __init__(self, line: Line, site: assembly.Site, log: Log, ended: Callable[[], object]) -> None:
        self._line, self._site, self._log, self._ended = line, site, log, ended
        self._sinks: list[_Opened] = []
        self._feeds: list[_Feed] = []

    async def become(self, wanted: Settings) -> None:
        """Open what is new, then exchange it; what is wanted as before goes on undisturbed.

        EdgeNodeError when something cannot be opened; all is then as it was.
        """
        sinks, missing_sinks, old_sinks = _compared(self._sinks, wanted.sinks)
        feeds, missing_feeds, old_feeds = _compared(self._feeds, wanted.sources)
        with contextlib.ExitStack() as undo:
            for each in missing_sinks:
                sinks.append(self._open(each))
                undo.enter_context(sinks[-1].closing)
            sources = assembly.sources(missing_feeds)
            self._log.become(wanted.log)
            undo.pop_all()
        self._line.view = wanted.view
        self._line.outbox = Immediate([each.sink for each in sinks])
        self._sinks = sinks
        await self._line.answer()  # the worker has let go of the old ones
        for old in old_sinks:
            await asyncio.to_thread(old.closing.close)
        for feed in old_feeds:
            await feed.end()
        self._feeds = feeds + [self._begun(*each) for each in zip(missing_feeds, sources, strict=True)]

    async def end(self) -> None:
        """Judge what the sources have brought; raises what ended one of them."""
        for feed in self._feeds:
            feed.stop.set()
        for feed in self._feeds:
            await feed.task

    def close(self) -> None:
        """Finish what is in hand, and close the sinks."""
        self._line.close()
        for each in self._sinks:
            each.closing.close()

    def _open(self, wanted: settings.Sink) -> _Opened:
        closing = contextlib.ExitStack()
        return _Opened(wanted, assembly.sinks([wanted], self._site, closing)[0], closing)

    def _begun(self, wanted: settings.Source, source: Source) -> _Feed:
        stop = asyncio.Event()
        task = asyncio.create_task(_feed(self._line, source, stop))
        task.add_done_callback(lambda _: None if stop.is_set() else self._ended())
        return _Feed(wanted, stop, task)


class _Part(Protocol):
    """Something that was made as `wanted` says."""

    @property
    def wanted(self) -> Any:
        """Its settings."""


_P = TypeVar("_P", bound=_Part)
_W = TypeVar("_W")


def _compared(there: Sequence[_P], wanted: Sequence[_W]) -> tuple[list[_P], list[_W], list[_P]]:
    """What stays of what is there, what of what is wanted is missing, and what is wanted no more."""
    old, kept, missing = list(there), [], []
    for each in wanted:
        found = next((part for part in old if part.wanted == each), None)
        if found is None:
            missing.append(each)
        else:
            old.remove(found)
            kept.append(found)
    return kept, missing, old


async def _feed(line: Line, source: Source, stop: asyncio.Event) -> None:
    """Judge a source's frames in their order; the next one is decoded while one is judged."""
    before: asyncio.Task[None] | None = None
    async for frame in source.frames(stop):
        prepared = await line.prepare(frame)
        if before:
            await before
        before = asyncio.create_task(_conclude(line, source, frame, prepared))
    if before:
        await before


async def _conclude(line: Line, source: Source, frame: Frame, prepared: Prepared) -> None:
    source.done(frame, await line.conclude(prepared))
