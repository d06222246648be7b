"""Progress as log lines: one for each closed round, and one for each other event worth a line."""

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from statistics import mean
from typing import TextIO

from broker_config.protocol.errors import replace_unprintable
from edge.terminal.formatting import format_bytes, format_metrics, format_remaining
from trainer.progress.events import (
    Activity,
    AnyEvent,
    Contribution,
    Gathering,
    Learning,
    Measured,
    NodeJoined,
    Received,
    Report,
    Result,
    RoundClosed,
    RoundOpened,
    Step,
    format_event,
)
from trainer.progress.remaining_time import Clock, RemainingTime

_MAX_ROUND_LINES = 50  # of more rounds only every n-th has a line, but at least one a minute
_MAX_JOIN_LINES = 10  # likewise
_MINUTE = 60.0
# seconds between two lines of a node that is learning, or of training alone, at least
_INTERVAL = 10.0
_STEP_INTERVAL = 5.0  # likewise, of a step that says how far it is


def log_lines(stream: TextIO, clock: Clock = time.monotonic) -> Report:
    """Write log lines with the time of day."""
    log = _Log(clock)

    def report(event: AnyEvent) -> None:
        line = log.format(event)
        if line:
            print(
                f"{time.strftime('%H:%M:%S')} {replace_unprintable(line)}", file=stream, flush=True
            )

    return report


class _Log:
    """Turns events into lines, few enough to be read however many rounds and nodes there are."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._remaining = RemainingTime(clock=clock)
        self._nodes = 0
        self._joined: set[str] = set()
        self._weights: dict[str, float] = {}  # of the open round, by node
        self._metrics: dict[str, dict[str, float]] = defaultdict(dict)  # the newest known, by node
        self._last_line = clock()  # when a round last had a line
        self._last_step = ("", 0.0)  # what last had a line, and when that was
        self._learning_lines: dict[
            str, tuple[int, float]
        ] = {}  # by party: the round of its last line, and when that was

    def format(self, event: AnyEvent) -> str:
        """The line for an event; empty if it deserves none."""
        match event:
            case RoundOpened():
                self._weights = {}
            case Contribution():
                self._weights[event.node] = event.weight
            case Measured():
                self._metrics[event.node] |= event.metrics
            case RoundClosed():
                self._remaining.close_round(event.round, event.seconds)
                return self._format_round(event) if self._is_due(event.round) else ""
            case NodeJoined():
                return self._format_join(event)
            case Learning():
                return self._format_learning(event)
            case Step(total=total) if total:
                return self._format_step(event)
            case Activity(what="judging", total=total) if total:
                return self._format_comparison(event)
            case Activity() | Received() | Result():
                pass
            case _:
                if isinstance(event, Gathering):
                    self._remaining = RemainingTime(event.rounds, self._clock)
                    self._nodes = event.nodes
                return format_event(event)
        return ""

    def _is_due(self, round_: int) -> bool:
        every = -(-self._remaining.rounds // _MAX_ROUND_LINES) or 1
        due = (
            round_ in (1, self._remaining.rounds)
            or round_ % every == 0
            or self._clock() - self._last_line >= _MINUTE
        )
        if due:
            self._last_line = self._clock()
        return due

    def _format_learning(self, event: Learning) -> str:
        round_, when = self._learning_lines.get(event.node, (0, 0.0))
        ended = 0 < event.rounds <= event.round
        if event.round == round_ or (round_ and not ended and self._clock() - when < _INTERVAL):
            return ""
        self._learning_lines[event.node] = event.round, self._clock()
        return format_event(event)

    def _format_step(self, event: Step) -> str:
        """How far a step is that takes long."""
        what, when = self._last_step
        if event.what == what and self._clock() - when < _STEP_INTERVAL:
            return ""
        self._last_step = (event.what, self._clock())
        return format_event(event)

    def _format_comparison(self, event: Activity) -> str:
        """How far a node is that trains alone, after the last round."""
        ended = event.done == event.total
        if not ended and self._clock() - self._last_line < _INTERVAL:
            return ""
        self._last_line = self._clock()
        trained = f"{event.node} has trained alone for {event.done} of {event.total} rounds"
        return f"{trained}; judging its models on held-out images" if ended else trained

    def _format_round(self, event: RoundClosed) -> str:
        left = self._remaining.seconds
        ahead = (
            ""
            if left is None
            else f", {self._remaining.rounds - event.round} to go ({format_remaining(left)})"
        )
        traffic = [
            f"{format_bytes(count)} {way}"
            for count, way in ((event.bytes_up, "up"), (event.bytes_down, "down"))
            if count
        ]
        texts = _sum_texts(event) if event.sums else self._metric_texts()
        details = ", ".join([*traffic, *texts])
        separator = ": " if details else ""
        return f"{format_event(event)}{ahead}{separator}{details}"

    def _metric_texts(self) -> list[str]:
        """Means over the nodes that report metrics; if none does, the range of the weights."""
        if self._metrics:
            of = f"mean of {len(self._metrics)} nodes: " if len(self._metrics) > 1 else ""
            return [of + format_metrics(_means(self._metrics))]
        if self._weights:
            low = min(self._weights.values())
            high = max(self._weights.values())
            low_text = f"weight {low:.3f}" if low == high else f"weights {low:.3f} to {high:.3f}"
            return [low_text]
        return []

    def _format_join(self, event: NodeJoined) -> str:
        if event.node in self._joined or self._nodes <= _MAX_JOIN_LINES:
            self._joined.add(event.node)
            return format_event(event)
        self._joined.add(event.node)
        count = len(self._joined)
        due = count % -(-self._nodes // _MAX_JOIN_LINES) == 0 or count >= self._nodes
        return f"{count} of {self._nodes} nodes have joined" if due else ""


def _sum_texts(event: RoundClosed) -> list[str]:
    """Nobody has trained. A node knows of its own sums alone."""
    count = len(event.contributors)
    count_text = "sums, no training" if count == 1 else f"sums of {count} nodes, no training"
    return [count_text]


def _means(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the nodes that have it."""
    names = dict.fromkeys(chain.from_iterable(metrics.values()))
    means: dict[str, float] = {}
    for name in names:
        means[name] = mean(found[name] for found in metrics.values() if name in found)
    return means
