"""Progress as lines of a log: one for each closed round, and one for each other event worth a line."""

import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import mean
from typing import TextIO

from broker_config.protocol.errors import printable
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
    describe,
)
from trainer.progress.remaining_time import Clock, Pace

_ROUNDS = 50  # lines of rounds; of more rounds only every so many-th has one, or one a minute
_JOINS = 10  # lines of nodes that join, likewise
_MINUTE = 60.0
_LINE = 10.0  # seconds between two lines about a line that learns, at least


def plain(stream: TextIO, clock: Clock = time.monotonic) -> Report:
    """Lines with the time of day."""
    log = _Log(clock)

    def report(event: AnyEvent) -> None:
        line = log.line(event)
        if line:
            print(f"{time.strftime('%H:%M:%S')} {printable(line)}", file=stream, flush=True)

    return report


class _Log:
    """Turns events into lines; few enough to be read, however many rounds and nodes there are."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._pace = Pace(clock=clock)
        self._nodes = 0
        self._joined: set[str] = set()
        self._weights: dict[str, float] = {}  # of the open round, by node
        self._metrics: dict[str, dict[str, float]] = defaultdict(dict)  # the newest known, by node
        self._said = clock()  # when the last round had a line
        self._learnt: dict[str, tuple[int, float]] = {}  # by party of a line: its round when it last had one, and when

    def line(self, event: AnyEvent) -> str:
        """What to say about an event; empty when nothing."""
        match event:
            case RoundOpened():
                self._weights = {}
            case Contribution():
                self._weights[event.node] = event.weight
            case Measured():
                self._metrics[event.node] |= event.metrics
            case RoundClosed():
                self._pace.close(event.round, event.seconds)
                return self._closed(event) if self._is_due(event.round) else ""
            case NodeJoined():
                return self._join(event)
            case Learning():
                return self._learning(event)
            case Activity() | Received() | Result():
                pass
            case _:
                if isinstance(event, Gathering):
                    self._pace, self._nodes = Pace(event.rounds, self._clock), event.nodes
                return describe(event)
        return ""

    def _is_due(self, round_: int) -> bool:
        every = -(-self._pace.rounds // _ROUNDS) or 1
        due = round_ in (1, self._pace.rounds) or round_ % every == 0 or self._clock() - self._said >= _MINUTE
        if due:
            self._said = self._clock()
        return due

    def _learning(self, event: Learning) -> str:
        round_, when = self._learnt.get(event.node, (0, 0.0))
        ended = 0 < event.rounds <= event.round
        if event.round == round_ or (round_ and not ended and self._clock() - when < _LINE):
            return ""
        self._learnt[event.node] = event.round, self._clock()
        return describe(event)

    def _closed(self, event: RoundClosed) -> str:
        left = self._pace.left
        ahead = "" if left is None else f", {self._pace.rounds - event.round} to go ({format_remaining(left)})"
        moved = [
            f"{format_bytes(count)} {way}"
            for count, way in ((event.bytes_up, "up"), (event.bytes_down, "down"))
            if count
        ]
        told = ", ".join([*moved, *self._figures()])
        return f"{describe(event)}{ahead}{': ' if told else ''}{told}"

    def _figures(self) -> list[str]:
        """Means over the nodes that tell their metrics; of nodes that do not, the range of their weights."""
        if self._metrics:
            of = f"mean of {len(self._metrics)} nodes: " if len(self._metrics) > 1 else ""
            return [of + format_metrics(_means(self._metrics))]
        if self._weights:
            low, high = min(self._weights.values()), max(self._weights.values())
            return [f"weight {low:.3f}" if low == high else f"weights {low:.3f} to {high:.3f}"]
        return []

    def _join(self, event: NodeJoined) -> str:
        if event.node in self._joined or self._nodes <= _JOINS:
            self._joined.add(event.node)
            return describe(event)
        self._joined.add(event.node)
        count = len(self._joined)
        due = count % -(-self._nodes // _JOINS) == 0 or count >= self._nodes
        return f"{count} of {self._nodes} nodes have joined" if due else ""


def _means(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the nodes that have it."""
    names = dict.fromkeys(name for found in metrics.values() for name in found)
    return {name: mean(found[name] for found in metrics.values() if name in found) for name in names}
