"""Reload of a running line's settings: view, prior, monitors, sources, sinks, log;
no frame and no outcome is lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from broker_config.protocol.errors import EdgeNodeError
from edge.config.instance import Instance
from edge.daemon import line_parts, line_settings
from edge.daemon.dispatcher import Dispatcher
from edge.daemon.line_settings import Settings
from edge.daemon.logs import Log
from edge.daemon.monitors import Monitors
from edge.inference.pipeline import Pipeline, Source, check_class_names
from edge.sources.source_runner import run_source

_FIXED = ("labels", "spool", "gate")  # tables that are read only when the daemon starts

_log = logging.getLogger(__name__)


class _RunningSource(NamedTuple):
    """A source and the task that inspects its frames."""

    wanted: line_settings.Source
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def is_over(self) -> bool:
        """Whether it was stopped or has failed; a video that has ended by itself has done what
        was wanted.
        """
        return self.stop.is_set() or (self.task.done() and self.task.exception() is not None)


class Reloader:
    """Brings the parts of a line in step with its settings."""

    def __init__(
        self,
        pipeline: Pipeline,
        dispatcher: Dispatcher,
        monitors: Monitors,
        instance: Instance,
        log: Log,
    ) -> None:
        self.dispatcher = dispatcher
        self._pipeline = pipeline
        self._monitors = monitors
        self._instance = instance
        self._log = log
        self._sources: list[_RunningSource] = []
        self._first: dict[str, Any] | None = None  # tables that were read when the daemon started
        # called when a source fails for good: that is a bug
        self.on_failure: Callable[[], None] = lambda: None

    async def apply(self, wanted: Settings) -> None:
        """Open what is new, then switch to it; what has not changed goes on undisturbed.

        EdgeNodeError when something cannot be used; all is then as it was. Only a source that has
        become unusable since the trial opening leaves all the rest as wanted; it is missing until
        the next reload.
        """
        check_class_names(wanted.view, wanted.prior, self._pipeline.model.manifest.classes)
        # A trial opening: the old sources have to end before the new ones begin.
        await asyncio.to_thread(line_parts.open_sources, wanted.sources, self._instance)
        with contextlib.ExitStack() as undo:
            keep = self._monitors.prepare(wanted)
            undo.callback(self._monitors.discard, keep)
            change = self.dispatcher.prepare(wanted.sinks)
            undo.callback(self.dispatcher.discard, change)
            self._log.apply(wanted.log)
            undo.pop_all()
        self._pipeline.view = wanted.view
        self._pipeline.prior = wanted.prior
        await self._monitors.apply(wanted, keep)
        await asyncio.to_thread(self.dispatcher.apply, change)
        self._log_fixed(wanted)
        await self._apply_sources(wanted.sources)

    async def stop_sources(self) -> None:
        """End the sources, once their frames are inspected;
        raises the error with which one of them has failed.
        """
        await _stop(self._sources)

    async def _apply_sources(self, wanted: Sequence[line_settings.Source]) -> None:
        """Open every source that can be, even if another cannot;
        raises the EdgeNodeError of the first that cannot.
        """
        kept, missing, _ = line_parts.diff(
            [each for each in self._sources if not each.is_over], wanted
        )
        await _stop([each for each in self._sources if each not in kept])
        self._sources = kept
        errors = []
        for each in missing:
            try:
                [source] = await asyncio.to_thread(line_parts.open_sources, [each], self._instance)
            except EdgeNodeError as error:
                errors.append(error)
            else:
                self._sources.append(self._start(each, source))
        if errors:
            raise errors[0]

    def _start(self, wanted: line_settings.Source, source: Source) -> _RunningSource:
        stop = asyncio.Event()
        task = asyncio.create_task(run_source(self._pipeline, source, stop))

        def report_failure(ended: asyncio.Task[None]) -> None:
            if ended.exception():
                self.on_failure()

        task.add_done_callback(report_failure)
        return _RunningSource(wanted, stop, task)

    def _log_fixed(self, wanted: Settings) -> None:
        tables = {name: getattr(wanted, name) for name in _FIXED} | wanted.added
        if self._first is None:
            self._first = tables
        for name in {**self._first, **tables}:
            if tables.get(name) != self._first.get(name):
                _log.warning("[%s] was changed in the settings: that needs a restart", name)


async def _stop(sources: Sequence[_RunningSource]) -> None:
    """Wait until their frames are inspected; raises the error with which one of them has failed."""
    for each in sources:
        each.stop.set()
    for each in sources:
        await each.task
