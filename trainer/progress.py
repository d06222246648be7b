"""What happens in a federation, as events; and the ways to show them: a live table, plain lines, JSON lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Base of all events; `event` in JSON is the class's name."""


class Gathering(Event, frozen=True, kw_only=True):
    """The coordinator waits for its nodes."""

    federation: str
    run: str
    nodes: int
    rounds: int


class NodeJoined(Event, frozen=True, kw_only=True):
    """A node takes part, for the first time or again."""

    node: str


class NodeLost(Event, frozen=True, kw_only=True):
    """A node's connection ended before its work did."""

    node: str
    round: int


class NodeRefused(Event, frozen=True, kw_only=True):
    """A peer broke the protocol and is left out."""

    node: str
    round: int
    reason: str


class Paused(Event, frozen=True, kw_only=True):
    """The open round waits for nodes to come back."""

    round: int
    waiting_for: list[str]


class RoundOpened(Event, frozen=True, kw_only=True):
    """Nodes may train."""

    round: int


class Contribution(Event, frozen=True, kw_only=True):
    """A node's contribution is summed."""

    node: str
    round: int
    weight: float  # raw, as the node measured it: L_D for AFedCL
    bytes: int


class Measured(Event, frozen=True, kw_only=True):
    """What a node tells of its round, if it opted in (always in simulation)."""

    node: str
    round: int
    metrics: dict[str, float]


class RoundClosed(Event, frozen=True, kw_only=True):
    """The contributions are averaged."""

    round: int
    contributors: list[str]
    seconds: float


class FederationFinished(Event, frozen=True, kw_only=True):
    """The last round is closed and every node has its model."""

    rounds: int
    bytes_up: int  # nodes -> coordinator
    bytes_down: int  # coordinator -> broker
    seconds: float


AnyEvent = (
    Gathering
    | NodeJoined
    | NodeLost
    | NodeRefused
    | Paused
    | RoundOpened
    | Contribution
    | Measured
    | RoundClosed
    | FederationFinished
)
Report = Callable[[AnyEvent], None]
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def ignore(event: AnyEvent) -> None:
    """Show nothing."""


def json_lines(stream: TextIO) -> Report:
    """One JSON object a line, for machines."""

    def report(event: AnyEvent) -> None:
        print(msgspec.json.encode(event).decode(), file=stream, flush=True)

    return report


def read_line(line: str | bytes) -> AnyEvent:
    """The event that `json_lines` wrote."""
    return _decoder.decode(line)


def describe(event: AnyEvent) -> str:
    """The event as a sentence."""
    match event:
        case Gathering():
            return f"federation {event.federation}: waiting for {event.nodes} nodes, {event.rounds} rounds"
        case NodeJoined():
            return f"{event.node} joined"
        case NodeLost():
            return f"{event.node} is gone (round {event.round}): its connection ended"
        case NodeRefused():
            return f"{event.node} is left out (round {event.round}): {event.reason}"
        case Paused():
            return f"round {event.round} waits for {', '.join(event.waiting_for) or 'more nodes'} to come back"
        case RoundOpened():
            return f"round {event.round} opened"
        case Contribution():
            return f"round {event.round}: {event.node} contributed {_size(event.bytes)}, weight {event.weight:.3f}"
        case Measured():
            return f"round {event.round}: {event.node}: {_values(event.metrics)}"
        case RoundClosed():
            return f"round {event.round} closed after {event.seconds:.1f} s"
        case FederationFinished():
            return (
                f"finished: {event.rounds} rounds in {event.seconds:.0f} s, {_size(event.bytes_up)} up,"
                f" {_size(event.bytes_down)} down"
            )


def _values(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())


def plain(stream: TextIO) -> Report:
    """A line for each round (weights and bytes; in simulation, which has none, metrics) and each other event."""
    facts: dict[str, str] = {}  # of the open round, by node
    opened = received = 0

    def report(event: AnyEvent) -> None:
        nonlocal opened, received
        match event:
            case RoundOpened():
                facts.clear()
                opened, received = event.round, 0
                return
            case Contribution():
                facts[event.node] = f"{event.weight:.3f}"
                received += event.bytes
                return
            case Measured() if "accuracy" not in event.metrics:
                if event.round == opened:  # stage 2 may end when the next round has begun
                    facts.setdefault(event.node, _values(event.metrics))
                return
            case RoundClosed():
                up = f", {_size(received)} up" if received else ""
                told = "; ".join(f"{node} {fact}" for node, fact in sorted(facts.items()))
                line = f"{describe(event)}{up}{': ' if told else ''}{told}"
            case _:
                line = describe(event)
        print(f"{time.strftime('%H:%M:%S')} {line}", file=stream, flush=True)

    return report


@contextmanager
def show(*, as_json: bool) -> Iterator[Report]:
    """The way that fits: JSON lines on request, a live table in a terminal, else plain lines."""
    if as_json:
        yield json_lines(sys.stdout)
    elif sys.stderr.isatty():
        with _Board(Console(stderr=True)) as board:
            yield board.report
    else:
        yield plain(sys.stderr)


class _Board:
    """A live table of nodes above a progress bar of rounds. Joins, losses and refusals scroll by above it."""

    def __init__(self, console: Console):
        self._console = console
        self._nodes: dict[str, dict[str, str]] = {}
        self._bar = Progress(
            TextColumn("round"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("rounds", total=None)
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def __enter__(self) -> "_Board":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def report(self, event: AnyEvent) -> None:
        match event:
            case Gathering():
                self._bar.update(self._task, total=event.rounds)
            case Contribution():
                self._row(event.node).update(round=str(event.round), sent=_size(event.bytes))
            case Measured():
                self._row(event.node).update({name: f"{value:.3f}" for name, value in event.metrics.items()})
            case RoundClosed():
                self._bar.update(self._task, completed=event.round)
            case NodeJoined() | NodeLost():
                self._row(event.node)["round"] = "-" if isinstance(event, NodeJoined) else "[red]gone[/red]"
        if not isinstance(event, Contribution | Measured | RoundOpened | RoundClosed):
            self._console.print(describe(event), highlight=False, markup=False)

    def _row(self, node: str) -> dict[str, str]:
        return self._nodes.setdefault(node, {})

    def _draw(self) -> Group:
        columns = list(dict.fromkeys(name for row in self._nodes.values() for name in row))
        table = Table(Column("node", no_wrap=True), *columns, box=None, pad_edge=False)
        for node, row in sorted(self._nodes.items()):
            table.add_row(node, *(row.get(name, "") for name in columns))
        return Group(table, self._bar)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
