"""Long work in one thread: whoever runs it can stop it between two steps, and is told how far
it is.

A command, or a thread, says once with `watched` who stops it and who is told. Code deep inside it,
such as a loop over images, takes its items from `steps`. Without a watch, nothing stops it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from trainer.progress.events import Report, Step
from trainer.progress.remaining_time import Clock

T = TypeVar("T")

_INTERVAL = 2.0  # seconds between two reports; what takes less is not worth one


class Stopped(Exception):  # noqa: N818  (not an error: the stop was requested)
    """Work was asked to stop between two steps."""


class _Watch:
    """Who stops the work of a thread, and who is told."""

    def __init__(self, report: Report, stop: Callable[[], bool], clock: Clock):
        self.report = report
        self.stop = stop
        self.clock = clock
        self.last = clock()  # when somebody was told last
        self.outermost: Loop | None = None  # of the loops that `steps` runs


_watch: ContextVar[_Watch | None] = ContextVar("watch", default=None)


def _never() -> bool:
    return False


@contextmanager
def watched(
    report: Report, stop: Callable[[], bool] = _never, clock: Clock = time.monotonic
) -> Iterator[None]:
    """Let `stop` end the work of this thread while the block runs, and `report` tell of it."""
    token = _watch.set(_Watch(report, stop, clock))
    try:
        yield
    finally:
        _watch.reset(token)


def check_stop() -> None:
    """Raise Stopped if the work of this thread has been asked to stop."""
    watch = _watch.get()
    if watch is not None and watch.stop():
        raise Stopped


class Loop:
    """A loop that may take long: `advance` comes before each of its `total` steps."""

    def __init__(self, what: str, total: int):
        self._what = what
        self._total = total
        self._done = -1
        self._watch = _watch.get()
        self._started = self._watch.clock() if self._watch else 0.0

    def advance(self) -> None:
        """Tell how many steps are done, if it is time.

        Raises:
            Stopped: the work was asked to stop before the next step.
        """
        check_stop()
        self._done += 1
        watch = self._watch
        if watch is None:
            return
        told = watch.outermost or self
        now = watch.clock()
        if now - max(watch.last, told._started) >= _INTERVAL:
            watch.last = now
            watch.report(Step(what=told._what, done=max(0, told._done), total=told._total))


def steps(what: str, items: Sequence[T]) -> Iterator[T]:
    """Pass the items on, one after another; the rest is as in `Loop`.

    Of loops in one another the outermost is told, also while a step of it takes long.
    """
    loop = Loop(what, len(items))
    watch = _watch.get()
    is_outermost = watch is not None and watch.outermost is None
    if watch is not None and is_outermost:
        watch.outermost = loop
    try:
        for item in items:
            loop.advance()
            yield item
    finally:
        if watch is not None and is_outermost:
            watch.outermost = None
