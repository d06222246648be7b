"""What of a line is exchanged while it runs: view, sources, sinks, log. No frame and no outcome is lost by it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from edge import assembly, settings
from edge.feed import feed
from edge.line import Line, Source
from edge.metrics import Counted, Metrics
from edge.operation.logs import Log
from edge.operation.outlets import Outlets
from edge.settings import Settings


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
    """A line's parts, as its settings want them. `failed` is told when one of them ends by a bug."""

    def __init__(
        self, line: Line, site: assembly.Site, log: Log, metrics: Metrics, failed: Callable[[], object]
    ) -> None:
        self._line, self._site, self._log, self._failed = line, site, log, failed
        self._outlets = Outlets(site)
        self._feeds: list[_Feed] = []
        line.outbox = Counted(metrics, self._outlets)
        metrics.ask(self._outlets.readings)

    async def become(self, wanted: Settings) -> None:
        """Open what is new, then exchange it; what is wanted as before goes on undisturbed.

        EdgeNodeError when something cannot be opened; all is then as it was.
        """
        feeds, missing, old = _compared(self._feeds, wanted.sources)
        sources = assembly.sources(missing, self._site)
        before = self._log.settings
        self._log.become(wanted.log)
        try:
            await asyncio.to_thread(self._outlets.become, wanted.sinks, wanted.spool)
        except Exception:
            self._log.become(before)
            raise
        self._line.view = wanted.view
        for each in old:
            await each.end()
        self._feeds = feeds + [self._begun(*each) for each in zip(missing, sources, strict=True)]

    async def end(self) -> None:
        """Judge what the sources have brought; raises what ended one of them."""
        for each in self._feeds:
            each.stop.set()
        for each in self._feeds:
            await each.task

    def close(self) -> None:
        """Finish what is in hand, and close the sinks."""
        self._line.close()
        self._outlets.close()

    def _begun(self, wanted: settings.Source, source: Source) -> _Feed:
        stop = asyncio.Event()
        task = asyncio.create_task(feed(self._line, source, stop))
        task.add_done_callback(lambda ended: self._failed() if ended.exception() else None)
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
