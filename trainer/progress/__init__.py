"""Progress of long commands: events as they happen, and the ways to show them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from trainer.progress.board import live
from trainer.progress.events import (
    Activity,
    AnyEvent,
    CellFinished,
    Contribution,
    Doing,
    Exported,
    FederationFinished,
    Gathering,
    Late,
    Learning,
    Measured,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Note,
    Paused,
    Received,
    Report,
    Result,
    RoundClosed,
    RoundOpened,
    Step,
    describe,
    ignore,
    json_lines,
    read_line,
)
from trainer.progress.plain import plain
from trainer.progress.rounds import Rounds
from trainer.progress.throttle import Throttle

__all__ = [
    "Activity",
    "AnyEvent",
    "CellFinished",
    "Contribution",
    "Doing",
    "Exported",
    "FederationFinished",
    "Gathering",
    "Late",
    "Learning",
    "Measured",
    "NodeJoined",
    "NodeLost",
    "NodeRefused",
    "Note",
    "Paused",
    "Received",
    "Report",
    "Result",
    "RoundClosed",
    "RoundOpened",
    "Rounds",
    "Step",
    "Throttle",
    "describe",
    "ignore",
    "json_lines",
    "plain",
    "read_line",
    "show",
]


@contextmanager
def show(*, as_json: bool, quiet: bool = False) -> Iterator[Report]:
    """The way that fits: JSON lines on request, a live view in a terminal, else plain lines.

    `quiet` shows nothing; as JSON, the result alone.
    """
    if as_json:
        report = json_lines(sys.stdout)
        yield (lambda event: report(event) if isinstance(event, Result) else None) if quiet else report
    elif quiet:
        yield ignore
    elif sys.stderr.isatty() and (console := Console(stderr=True)).is_interactive:
        with live(console) as report:
            yield report
    else:
        yield plain(sys.stderr)
