"""Progress as a live view in a terminal: a row for each node above a bar of rounds, as there is room."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from broker_config.protocol.errors import printable
from edge.terminal.formatting import (
    format_bytes,
    format_elapsed,
    format_metric,
    format_remaining,
    natural_key,
    pluralize,
)
from edge.terminal.tables import Redrawn, Row, fit, table
from trainer.progress.events import (
    Activity,
    AnyEvent,
    CellFinished,
    Contribution,
    FederationFinished,
    Gathering,
    Learning,
    Measured,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Note,
    Received,
    Report,
    Result,
    RoundClosed,
    RoundOpened,
    Step,
    describe,
)
from trainer.progress.remaining_time import Clock, Pace

_LONGEST_BAR, _SHORTEST_BAR = 40, 6
_KEPT_FREE = 8  # lines of the terminal that the rows of nodes leave to the rest
_FEWEST_ROWS = 3
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_AWAY = ("gone", "left out")
# The more important columns come first; these are dropped last when there is no room.
_RANKS = ("doing", "round", "accuracy", "up", "down", "L_D", "A_k")


@contextmanager
def live(console: Console) -> Iterator[Report]:
    """Show a board until the block is left; it stays in the terminal as it was then."""
    board, lock = Board(ascii_only=console.options.ascii_only), threading.Lock()

    def draw(width: int, height: int) -> list[Text]:
        with lock:
            return board.lines(width, height)

    def report(event: AnyEvent) -> None:
        with lock:
            said = board.take(event)
        for line in said:
            console.print(printable(line), highlight=False, markup=False)

    with Redrawn(console, draw):
        yield report


@dataclass
class _Row:
    """What is known of a node."""

    round: str = ""
    doing: str = "waiting"
    part: str = ""  # of what travels
    up: int = 0  # bytes
    down: int = 0
    metrics: dict[str, str] = field(default_factory=dict)

    def shown(self) -> Row:
        traffic = {title: format_bytes(count) for title, count in (("up", self.up), ("down", self.down)) if count}
        return Row(self.doing, self.part, {"round": self.round, **self.metrics, **traffic})


class Board:
    """What the live view shows, for any width and height."""

    def __init__(self, *, ascii_only: bool = False, clock: Clock = time.monotonic):
        self._clock, self._ascii = clock, ascii_only
        self._rows: dict[str, _Row] = {}
        self._pace = Pace(clock=clock)
        self._started = self._stepped = clock()
        self._step = self._waiting = self._finished = ""
        self._up = self._down = 0  # bytes
        self._cells: CellFinished | None = None  # the newest

    def take(self, event: AnyEvent) -> list[str]:
        """Take in an event; returns the lines that should scroll by above the board."""
        match event:
            case Step():
                said = self._end_step()
                self._step, self._stepped = event.what, self._clock()
                return said
            case Gathering():
                self._pace, self._started = Pace(event.rounds, self._clock), self._clock()
                self._waiting = f"waiting for {pluralize(event.nodes, event.what)}"
                return [*self._end_step(), describe(event)]
            case FederationFinished():
                self._finished = describe(event)
                for row in self._rows.values():
                    row.doing, row.part = row.doing if row.doing in _AWAY else "", ""
                return []
            case Result():
                return self._end_step()
            case RoundOpened():
                self._waiting = ""
            case RoundClosed():
                self._pace.close(event.round, event.seconds)
                self._up, self._down = self._up + event.bytes_up, self._down + event.bytes_down
            case Activity() | Received() | Contribution() | Measured() | NodeJoined() | NodeLost() | NodeRefused():
                return self._take_of_node(event)
            case Learning():
                self._take_of_line(event)
            case CellFinished():
                self._cells, self._stepped = event, self._clock()
                return [*self._end_step(), describe(event)]
            case Note():
                return [*self._end_step(), describe(event)]
            case _:
                return [describe(event)]
        return []

    def _take_of_node(
        self, event: Activity | Received | Contribution | Measured | NodeJoined | NodeLost | NodeRefused
    ) -> list[str]:
        row = self._rows.setdefault(event.node, _Row())
        match event:
            case Activity():
                row.round, row.doing = str(event.round or ""), event.what
                row.part = f"{100 * event.done // event.total}%" if event.done else ""
            case Received():
                row.down += event.bytes
            case Contribution():
                row.up += event.bytes
            case Measured():
                row.metrics |= {
                    printable(name, keep=""): format_metric(name, figure) for name, figure in event.metrics.items()
                }
            case NodeJoined():
                row.doing, row.part = "waiting", ""
                return [describe(event)]
            case NodeLost() | NodeRefused():
                row.doing, row.part = "gone" if isinstance(event, NodeLost) else "left out", ""
                return [describe(event)]
        return []

    def _take_of_line(self, event: Learning) -> None:
        self._waiting, row = "", self._rows.setdefault(event.node, _Row())
        row.round, row.doing = str(event.round), "learning"
        row.metrics["rounds/s"] = f"{event.rate:.1f}"
        if event.loss is not None:
            row.metrics["loss"] = format_metric("loss", event.loss)
        if event.round > self._pace.closed:
            self._pace.close(event.round, 1 / max(event.rate, 1e-3))

    def _end_step(self) -> list[str]:
        step, took = self._step, self._clock() - self._stepped
        self._step = ""
        if not step:
            return []
        return [f"{step} ({format_elapsed(took)})" if took >= 1 else step]

    def lines(self, width: int, height: int) -> list[Text]:
        """The board as lines, none wider than `width`."""
        lines = self._table(width, max(_FEWEST_ROWS, height - _KEPT_FREE)) if self._rows else []
        if self._finished:
            lines.append(Text(self._finished))
        elif self._cells:
            lines.append(self._grid(self._cells, width))
        elif self._waiting or self._pace.rounds:
            lines.append(self._status(width))
        if self._step:
            lines.append(self._busy(self._step, self._stepped, width))
        fit(lines, width, ascii_only=self._ascii)
        return lines

    # The rows of nodes

    def _table(self, width: int, room: int) -> list[Text]:
        rows = {name: self._rows[name].shown() for name in sorted(self._rows, key=natural_key)}
        metrics = dict.fromkeys(name for row in self._rows.values() for name in row.metrics)
        return table(rows, ("round", "doing", *metrics, "up", "down"), _RANKS, width, room)

    # The lines below them

    def _status(self, width: int) -> Text:
        """Where the federation stands."""
        if self._waiting:
            return self._busy(self._waiting, self._started, width)
        pace = self._pace
        line = self._bar(f"round {min(pace.closed + 1, pace.rounds)}", pace.closed, pace.rounds, pace.left, width)
        moved = f", {format_bytes(self._up)} up, {format_bytes(self._down)} down" if self._up or self._down else ""
        for more in (f", {format_elapsed(self._clock() - self._started)} so far", moved):
            if line.cell_len + len(more) <= width:
                line.append(more, style="dim")
        return line

    def _grid(self, cell: CellFinished, width: int) -> Text:
        """Where the grid stands."""
        left = None if cell.left is None else max(0.0, cell.left - (self._clock() - self._stepped))
        return self._bar(f"{cell.done} done", cell.done, cell.total, left, width)

    def _bar(self, told: str, done: int, total: int, left: float | None, width: int) -> Text:
        """`told` of the total, a bar where there is room, and the seconds left."""
        before, after = f"{told} of {total} ", "" if left is None else f" {format_remaining(left)} left"
        line = Text(before)
        bar = min(_LONGEST_BAR, width - len(before) - len(after))
        if bar >= _SHORTEST_BAR:
            full = bar * done // total
            mark, rest = ("#", "-") if self._ascii else ("━", "━")
            line.append(mark * full, style="green").append(rest * (bar - full), style="dim")
        return line.append(after)

    def _busy(self, text: str, since: float, width: int) -> Text:
        """Something that takes a time unknown: it turns, so that one sees that it goes on."""
        seconds = self._clock() - since
        mark = "|/-\\"[int(4 * seconds) % 4] if self._ascii else _SPINNER[int(4 * seconds) % len(_SPINNER)]
        after = f"  {format_elapsed(seconds)}"
        return Text(f"{mark} {_cut(text, width - 2 - len(after))}{after}")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"
