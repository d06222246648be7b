"""What of a line is exchanged while it runs: view, sources, sinks, log. No frame and no outcome is lost by it."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from broker_config.errors import EdgeNodeError
from edge import assembly, settings
from edge.feed import feed
from edge.line import Line, Source
from edge.operation.compare import compared
from edge.operation.logs import Log
from edge.operation.receivers import Receivers
from edge.operation.watching import Watching
from edge.settings import Settings
from edge.view.decide import check

_FIXED = ("spool", "gate", "arrival")  # tables that are looked at when the daemon starts

_log = logging.getLogger(__name__)


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
    """A line's parts, as its settings want them."""

    def __init__(self, line: Line, receivers: Receivers, watching: Watching, site: assembly.Site, log: Log) -> None:
        self._line, self.receivers, self._watching, self._site, self._log = line, receivers, watching, site, log
        self._feeds: list[_Feed] = []
        self._now: Settings | None = None
        self.failed: Callable[[], None] = lambda: None  # told when a source fails for good: that is a bug

    async def become(self, wanted: Settings) -> None:
        """Open what is new, then exchange it; what is wanted as before goes on undisturbed.

        EdgeNodeError when something cannot be used; all is then as it was.
        """
        check(wanted.view, self._line.model.manifest.classes)
        await asyncio.to_thread(assembly.sources, wanted.sources, self._site)  # for trial: the old ones have to end before the new ones begin
        keep = self._watching.prepare(wanted)
        change = self.receivers.prepare(wanted.sinks)
        try:
            self._log.become(wanted.log)
        except EdgeNodeError:
            self.receivers.abandon(change)
            raise
        self._line.view = wanted.view
        await self._watching.exchange(wanted, keep)
        await asyncio.to_thread(self.receivers.exchange, change)
        kept, missing, old = compared(self._feeds, wanted.sources)
        for each in old:
            await each.end()
        sources = assembly.sources(missing, self._site)
        self._feeds = kept + [self._begun(*each) for each in zip(missing, sources, strict=True)]
        self._tell_fixed(wanted)

    async def end(self) -> None:
        """Judge what the sources have brought; raises what ended one of them."""
        for each in self._feeds:
            each.stop.set()
        for each in self._feeds:
            await each.task

    def _begun(self, wanted: settings.Source, source: Source) -> _Feed:
        stop = asyncio.Event()
        task = asyncio.create_task(feed(self._line, source, stop))
        task.add_done_callback(lambda _: self.failed() if task.exception() else None)
        return _Feed(wanted, stop, task)

    def _tell_fixed(self, wanted: Settings) -> None:
        for name in _FIXED:
            if self._now and getattr(wanted, name) != getattr(self._now, name):
                _log.warning("[%s] was changed in the settings: that needs a restart", name)
        self._now = self._now or wanted
