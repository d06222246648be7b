"""Live view of progress in a terminal: a table of nodes above a bar of rounds, updated in place."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from broker_config.protocol.errors import replace_unprintable
from edge.terminal.formatting import (
    format_bytes,
    format_elapsed,
    format_metric,
    format_remaining,
    natural_key,
    pluralize,
)
from edge.terminal.tables import Row, first_that_fits, node_table, one_line
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
    Result,
    RoundClosed,
    RoundOpened,
    Step,
    format_event,
)
from trainer.progress.remaining_time import Clock, RemainingTime

_MAX_BAR = 40
_MIN_BAR = 6
_RESERVED_LINES = 8  # of the terminal, for what is not the table of nodes
_MIN_ROWS = 3
_ABSENT = ("gone", "left out")
# The more important columns come first; where the terminal is narrow, the last ones are dropped
# first.
_PRIORITY = ("state", "round", "accuracy", "up", "down")


class LiveReport:
    """Reporter that draws a board; `paused` leaves the terminal to a question."""

    def __init__(self, console: Console, headlines: Sequence[str]):
        self._console = console
        self._board = Board(headlines, ascii_only=console.options.ascii_only)
        self._lock = threading.Lock()
        self.view = Live(
            console=console, get_renderable=self._draw, refresh_per_second=4, redirect_stdout=False
        )

    def __call__(self, event: AnyEvent) -> None:
        """Take account of an event."""
        with self._lock:
            messages = self._board.update(event)
        for message in messages:
            self._console.print(Text(replace_unprintable(message)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Draw nothing while the block runs."""
        self.view.stop()
        try:
            yield
        finally:
            self.view.start()

    def _draw(self) -> Group:
        with self._lock:
            return self._board.render(self._console)


@contextmanager
def live(console: Console, headlines: Sequence[str] = ()) -> Iterator[LiveReport]:
    """Show a board while the block runs; its last state stays in the terminal."""
    report = LiveReport(console, headlines)
    with report.view:
        yield report


@dataclass
class _Node:
    """What is known of a node."""

    round: str = ""
    state: str = "waiting"
    percent: str = ""  # of a transfer
    up: int = 0  # bytes
    down: int = 0
    metrics: dict[str, str] = field(default_factory=dict)

    def row(self) -> Row:
        traffic = {
            title: format_bytes(count)
            for title, count in (("up", self.up), ("down", self.down))
            if count
        }
        return Row(self.state, self.percent, {"round": self.round, **self.metrics, **traffic})


class Board:
    """State of the live view, updated by events and rendered for a terminal of any size.

    A narrow terminal shows the metrics among `headlines` before others.
    """

    def __init__(
        self,
        headlines: Sequence[str] = (),
        *,
        ascii_only: bool = False,
        clock: Clock = time.monotonic,
    ):
        self._clock = clock
        self._priority = (*_PRIORITY, *headlines)
        spinner = "line" if ascii_only else "dots"
        self._spinner = Spinner(spinner)
        self._nodes: dict[str, _Node] = {}
        self._remaining = RemainingTime(clock=clock)
        self._started = self._step_started = clock()
        self._step = self._waiting = self._finished = ""
        self._done = ""  # of the step
        self._up = self._down = 0  # bytes
        self._cells: CellFinished | None = None  # the newest

    def update(self, event: AnyEvent) -> list[str]:
        """Take account of an event; returns the messages to print above the board."""
        match event:
            case Step():
                return self._begin_step(event)
            case Gathering():
                self._remaining = RemainingTime(event.rounds, self._clock)
                self._started = self._clock()
                self._finished = ""  # an earlier run
                self._waiting = f"waiting for {pluralize(event.nodes, event.what)}"
                return [*self._end_step(), format_event(event)]
            case FederationFinished():
                self._finished = format_event(event)
                for node in self._nodes.values():
                    node.state = node.state if node.state in _ABSENT else ""
                    node.percent = ""
                return []
            case Result():
                return self._end_step()
            case RoundOpened():
                self._waiting = ""
            case RoundClosed():
                self._remaining.close_round(event.round, event.seconds)
                self._up = self._up + event.bytes_up
                self._down = self._down + event.bytes_down
            case (
                Activity()
                | Received()
                | Contribution()
                | Measured()
                | NodeJoined()
                | NodeLost()
                | NodeRefused()
            ):
                return self._update_node(event)
            case Learning():
                self._update_learning(event)
            case CellFinished():
                self._cells = event
                self._step_started = self._clock()
                return [*self._end_step(), format_event(event)]
            case Note():
                return [*self._end_step(), format_event(event)]
            case _:
                return [format_event(event)]
        return []

    def _update_node(
        self,
        event: Activity | Received | Contribution | Measured | NodeJoined | NodeLost | NodeRefused,
    ) -> list[str]:
        node = self._nodes.setdefault(event.node, _Node())
        match event:
            case Activity():
                node.round = str(event.round or "")
                node.state = event.what
                node.percent = f"{100 * event.done // event.total}%" if event.done else ""
            case Received():
                node.down += event.bytes
            case Contribution():
                node.up += event.bytes
            case Measured():
                node.metrics |= {
                    name: format_metric(name, value) for name, value in event.metrics.items()
                }
            case NodeJoined():
                node.state = "waiting"
                node.percent = ""
                return [format_event(event)]
            case NodeLost() | NodeRefused():
                node.state = "gone" if isinstance(event, NodeLost) else "left out"
                node.percent = ""
                return [format_event(event)]
        return []

    def _update_learning(self, event: Learning) -> None:
        self._waiting = ""
        node = self._nodes.setdefault(event.node, _Node())
        node.round = str(event.round)
        node.state = "learning"
        node.metrics["rounds/s"] = f"{event.rate:.2g}"
        if event.loss is not None:
            node.metrics["loss"] = format_metric("loss", event.loss)
        if event.validation:
            found = {"accuracy": event.validation.accuracy, "rmse": event.validation.rmse}
            node.metrics |= {
                name: format_metric(name, value)
                for name, value in found.items()
                if value is not None
            }
        if event.rate and event.round > self._remaining.closed:
            self._remaining.close_round(event.round, 1 / event.rate)

    def _begin_step(self, event: Step) -> list[str]:
        self._done = f": {event.done} of {event.total}" if event.total else ""
        if event.what == self._step:
            return []
        messages = self._end_step()
        self._step = event.what
        self._step_started = self._clock()
        return messages

    def _end_step(self) -> list[str]:
        step = self._step
        seconds = self._clock() - self._step_started
        self._step = ""
        if not step:
            return []
        step_text = f"{step} ({format_elapsed(seconds)})" if seconds >= 1 else step
        return [step_text]

    def render(self, console: Console) -> Group:
        """The board for the terminal's present size."""
        parts: list[RenderableType] = [self._table(console)] if self._nodes else []
        if self._finished:
            parts.append(one_line(self._finished, console))
        elif self._cells:
            parts.append(self._cells_bar(self._cells, console))
        elif self._waiting:
            parts.append(self._busy(self._waiting, self._started, console))
        elif self._remaining.rounds:
            parts.append(self._rounds_bar(console))
        if self._step:
            parts.append(self._busy(self._step + self._done, self._step_started, console))
        return Group(*parts)

    def _table(self, console: Console) -> Group:
        rows = {name: self._nodes[name].row() for name in sorted(self._nodes, key=natural_key)}
        metrics = dict.fromkeys(chain.from_iterable(node.metrics for node in self._nodes.values()))
        titles = ("round", "state", *metrics, "up", "down")
        return node_table(
            rows, titles, self._priority, console, max(_MIN_ROWS, console.height - _RESERVED_LINES)
        )

    def _rounds_bar(self, console: Console) -> Table:
        rounds = self._remaining.rounds
        closed = self._remaining.closed
        extras = [f"{format_elapsed(self._clock() - self._started)} so far"]
        if self._up or self._down:
            extras.append(f"{format_bytes(self._up)} up, {format_bytes(self._down)} down")
        return _bar(
            f"round {min(closed + 1, rounds)} of {rounds}",
            closed / rounds,
            self._remaining.seconds,
            console,
            extras,
        )

    def _cells_bar(self, cell: CellFinished, console: Console) -> Table:
        left = (
            None
            if cell.left is None
            else max(0.0, cell.left - (self._clock() - self._step_started))
        )
        return _bar(f"{cell.done} of {cell.total} done", cell.done / cell.total, left, console)

    def _busy(self, text: str, since: float, console: Console) -> Table:
        """Work of unknown duration: a spinner shows that it goes on."""
        return _line(
            self._spinner,
            one_line(text, console),
            Text(format_elapsed(self._clock() - since), no_wrap=True),
        )


def _bar(
    label: str, done: float, left: float | None, console: Console, extras: Sequence[str] = ()
) -> Table:
    """A label, a bar filled to the share `done`, the seconds left,
    and as many of the extras as fit.
    """
    remaining = [] if left is None else [f"{format_remaining(left)} left"]
    width = min(_MAX_BAR, console.width - sum(len(text) + 1 for text in (label, *remaining)))
    bar = [ProgressBar(1.0, done, width, complete_style="green")] if width >= _MIN_BAR else []
    tails = [[*remaining, *extras[:count]] for count in range(len(extras), -1, -1)]
    candidates = []
    for tail in [*tails, []]:
        tail_text = [Text(", ".join(tail), no_wrap=True)] if tail else []
        candidates.append(_line(Text(label), *bar, *tail_text))
    return first_that_fits(candidates, console)


def _line(*cells: RenderableType) -> Table:
    line = Table.grid(padding=(0, 1))
    line.add_row(*cells)
    return line
