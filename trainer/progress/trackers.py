"""Experiment trackers, which packages register among `edge_node.trackers`: the interface of one,
and the thread that feeds it from events and holds up nobody.
"""

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from broker_config.protocol.errors import UsageError, abbreviate, suggest
from broker_config.protocol.messages import Option
from broker_config.registry import Registry
from edge.terminal.formatting import pluralize
from trainer.progress.events import (
    AnyEvent,
    Contribution,
    FederationFinished,
    Gathering,
    Measured,
    Note,
    Report,
    RoundClosed,
)

_BATCH = 500  # points at once
# what a tracker takes; a metric's name comes from a node
_NAME = re.compile(r"\w[\w. -]*", re.ASCII)


class Run(NamedTuple):
    """A federation's run, with its settings."""

    federation: str
    id: str
    settings: Mapping[str, Option]


class Point(NamedTuple):
    """One value of a metric; `name` is METRIC/NODE, or round/WHAT of the whole round."""

    name: str
    value: float
    round: int
    time: float  # seconds since 1970


class Tracker(Protocol):
    """One place that records runs. What is registered makes it of the place's name, a text.

    Its methods may take long and raise anything: they are then called again.
    """

    remedy: str
    """What to do when it fails."""

    def begin(self, run: Run) -> None:
        """Begin to record a run, or go on with one that it knows."""

    def record(self, points: Sequence[Point]) -> None:
        """Record values of the run."""

    def end(self, *, finished: bool) -> None:
        """The run has finished, or is suspended."""


TRACKERS: Registry[Callable[[str], Tracker]] = Registry("trackers", needed=False)


class Limits(NamedTuple):
    """How long and how much a tracker may keep waiting."""

    retry: float = 10.0  # seconds between two attempts
    patience: float = 5.0  # seconds at the end of a federation, for what still waits
    waiting: int = 20_000  # points, some megabytes: beyond that the newest are dropped


LIMITS = Limits()


@contextmanager
def track(wanted: Mapping[str, str], report: Report) -> Iterator[Report]:
    """A report that also feeds trackers, given as name and place.

    Raises:
        UsageError: there is no such tracker, its package is not installed, or the place cannot be
            one.
    """
    made = {name: _make(name, place) for name, place in wanted.items()}
    with ExitStack() as stack:
        for name, tracker in made.items():
            report = stack.enter_context(tracking(name, tracker, report))
        yield report


def _make(name: str, place: str) -> Tracker:
    if name not in TRACKERS:
        remedy = "install the package that adds it"
        if TRACKERS:
            remedy = f"{suggest(name, TRACKERS)} (or {remedy})"
        raise UsageError(f"there is no tracker {name!r}", remedy)
    return TRACKERS[name](place)


@contextmanager
def tracking(
    name: str, tracker: Tracker, report: Report, limits: Limits = LIMITS
) -> Iterator[Report]:
    """A report that also feeds a tracker; `report` gets everything,
    and is told once if the tracker fails.
    """
    feed = _Feed(name, tracker, limits)

    def track(event: AnyEvent) -> None:
        report(event)
        feed.take(event)
        feed.tell(report)

    try:
        yield track
    finally:
        feed.close()
        feed.tell(report)


def to_points(event: AnyEvent) -> Iterator[tuple[str, float, int]]:
    """The name, value and round of each metric that an event carries."""
    match event:
        case Measured(node=node, round=round_, metrics=metrics):
            yield from (
                (f"{each}/{node}", metrics[each], round_)
                for each in metrics
                if _NAME.fullmatch(each)
            )
        case Contribution(node=node, round=round_):
            yield f"weight/{node}", event.weight, round_
            yield f"bytes/{node}", event.bytes, round_
        case RoundClosed(round=round_):
            for name in ("seconds", "bytes_up", "bytes_down"):
                yield f"round/{name}", getattr(event, name), round_
            yield "round/contributors", len(event.contributors), round_
            for node, counted in event.limited.items():
                yield from (
                    (f"counted {what}/{node}", share, round_) for what, share in counted.items()
                )


class _Feed:
    """What waits for one tracker, and the thread that brings it there.

    All methods are called by one other thread.
    """

    def __init__(self, name: str, tracker: Tracker, limits: Limits):
        self._name = name
        self._tracker = tracker
        self._limits = limits
        # None: there are no more
        self._points: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._finished = self._failed = False
        self._taken = self._recorded = 0  # points

    def take(self, event: AnyEvent) -> None:
        if (
            isinstance(event, Gathering)
            and self._thread is None
            and not event.settings.get("chooses")  # the run that is wanted follows
        ):
            run = Run(event.federation, event.run, event.settings)
            self._thread = threading.Thread(
                target=self._work, args=(run,), daemon=True, name=f"tracker-{self._name}"
            )
            self._thread.start()
        self._finished |= isinstance(event, FederationFinished) and self._thread is not None
        now = time.time()
        points = to_points(event) if self._thread else ()
        for name, value, round_ in points:
            self._taken += 1
            if self._points.qsize() < self._limits.waiting:
                self._points.put(Point(name, float(value), round_, now))

    def tell(self, report: Report) -> None:
        while not self._notes.empty():
            report(Note(text=self._notes.get()))

    def close(self) -> None:
        if self._thread is None:
            return
        self._closing.set()
        self._points.put(None)
        self._thread.join(self._limits.patience)
        if lost := self._taken - self._recorded:
            self._note(f"{self._name} lacks {pluralize(lost, 'value')} of this run")

    def _work(self, run: Run) -> None:
        if not self._attempt(partial(self._tracker.begin, run)):
            return
        for batch in self._batches():
            if not self._attempt(partial(self._tracker.record, batch)):
                return
            self._recorded += len(batch)
        self._attempt(partial(self._tracker.end, finished=self._finished))

    def _batches(self) -> Iterator[list[Point]]:
        """What waits, at most _BATCH at once, until there will be no more."""
        last: Point | None
        while last := self._points.get():
            batch = [last]
            while last and len(batch) < _BATCH and not self._points.empty():
                if last := self._points.get():
                    batch.append(last)
            yield batch
            if last is None:
                return

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Try until it works; False if it does not, and the federation has ended."""
        while True:
            is_last = self._closing.is_set()
            try:
                action()
            except Exception as error:  # whatever it is, the federation goes on
                self._report_failure(error)
                if is_last:
                    return False
                self._closing.wait(self._limits.retry)
            else:
                return True

    def _report_failure(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            reason = abbreviate(str(error) or type(error).__name__)
            remedy = self._tracker.remedy
            self._note(
                f"{self._name} records nothing now: {reason}; the federation goes on, and values "
                f"wait. What to do: {remedy}"
            )

    def _note(self, text: str) -> None:
        self._notes.put(text)
