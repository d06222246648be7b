"""What of a line is exchanged while it runs: view, sources, sinks, log. No frame and no outcome is lost by it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from broker_config.protocol.errors import EdgeNodeError
from edge.config import line_settings
from edge.config.line_settings import Settings
from edge.daemon import assembly
from edge.daemon.dispatcher import Receivers
from edge.daemon.logs import Log
from edge.daemon.monitors import Watching
from edge.daemon.settings_diff import compared
from edge.inference.decision import check_no_defect_class
from edge.inference.pipeline import Pipeline, Source
from edge.sources.source_runner import feed

_FIXED = ("spool", "gate", "arrival")  # tables that are looked at when the daemon starts

_log = logging.getLogger(__name__)


class _Feed(NamedTuple):
    """A source whose frames are judged."""

    wanted: line_settings.Source
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def over(self) -> bool:
        """Whether it was stopped or has failed; a film that has ended by itself has done what was wanted."""
        return self.stop.is_set() or (self.task.done() and self.task.exception() is not None)


class Parts:
    """A line's parts, as its settings want them."""

    def __init__(
        self, pipeline: Pipeline, receivers: Receivers, watching: Watching, site: assembly.Site, log: Log
    ) -> None:
        self._pipeline, self.receivers, self._watching, self._site, self._log = pipeline, receivers, watching, site, log
        self._feeds: list[_Feed] = []
        self._now: Settings | None = None
        self.failed: Callable[[], None] = lambda: None  # told when a source fails for good: that is a bug

    async def become(self, wanted: Settings) -> None:
        """Open what is new, then exchange it; what is wanted as before goes on undisturbed.

        EdgeNodeError when something cannot be used; all is then as it was. Only a source that has become unusable since
        it was opened for trial leaves all the rest as wanted; it is missing until the next time.
        """
        check_no_defect_class(wanted.view, self._pipeline.model.manifest.classes)
        await asyncio.to_thread(
            assembly.sources, wanted.sources, self._site
        )  # for trial: the old ones have to end before the new ones begin
        with contextlib.ExitStack() as undo:
            keep = self._watching.prepare(wanted)
            undo.callback(self._watching.abandon, keep)
            change = self.receivers.prepare(wanted.sinks)
            undo.callback(self.receivers.abandon, change)
            self._log.become(wanted.log)
            undo.pop_all()
        self._pipeline.view = wanted.view
        await self._watching.exchange(wanted, keep)
        await asyncio.to_thread(self.receivers.exchange, change)
        self._tell_fixed(wanted)
        await self._exchange_sources(wanted.sources)

    async def end(self) -> None:
        """Judge what the sources have brought; raises what ended one of them."""
        await _end(self._feeds)

    async def _exchange_sources(self, wanted: Sequence[line_settings.Source]) -> None:
        """Those that can be opened are, also when one cannot; EdgeNodeError says why that one cannot."""
        kept, missing, _ = compared([each for each in self._feeds if not each.over], wanted)
        await _end([each for each in self._feeds if each not in kept])
        self._feeds = kept
        errors = []
        for each in missing:
            try:
                [source] = await asyncio.to_thread(assembly.sources, [each], self._site)
            except EdgeNodeError as error:
                errors.append(error)
            else:
                self._feeds.append(self._begun(each, source))
        if errors:
            raise errors[0]

    def _begun(self, wanted: line_settings.Source, source: Source) -> _Feed:
        stop = asyncio.Event()
        task = asyncio.create_task(feed(self._pipeline, source, stop))
        task.add_done_callback(lambda _: self.failed() if task.exception() else None)
        return _Feed(wanted, stop, task)

    def _tell_fixed(self, wanted: Settings) -> None:
        for name in _FIXED:
            if self._now and getattr(wanted, name) != getattr(self._now, name):
                _log.warning("[%s] was changed in the settings: that needs a restart", name)
        self._now = self._now or wanted


async def _end(feeds: Sequence[_Feed]) -> None:
    """Judge what they have brought; raises what ended one of them."""
    for each in feeds:
        each.stop.set()
    for each in feeds:
        await each.task
