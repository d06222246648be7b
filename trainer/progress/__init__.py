"""Progress of long commands: events as they happen, and reporters that show them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from trainer.progress.board import LiveReport, live
from trainer.progress.events import (
    Activity,
    ActivityKind,
    AnyEvent,
    CellFinished,
    Contribution,
    Exported,
    FederationFinished,
    Gathering,
    Late,
    Learning,
    Measured,
    ModelReady,
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
    format_event,
    ignore,
    json_lines,
    parse_event,
)
from trainer.progress.log import log_lines
from trainer.progress.long_work import Loop, Stopped, check_stop, steps, watched
from trainer.progress.reporters import ActivityReporter, RoundReporter

__all__ = [
    "Activity",
    "ActivityKind",
    "ActivityReporter",
    "AnyEvent",
    "CellFinished",
    "Contribution",
    "Exported",
    "FederationFinished",
    "Gathering",
    "Late",
    "Learning",
    "LiveReport",
    "Loop",
    "Measured",
    "ModelReady",
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
    "RoundReporter",
    "Step",
    "Stopped",
    "check_stop",
    "format_event",
    "ignore",
    "json_lines",
    "log_lines",
    "parse_event",
    "reporter",
    "steps",
    "watched",
]


@contextmanager
def reporter(
    *, as_json: bool, quiet: bool = False, headlines: Callable[[], Sequence[str]] = tuple
) -> Iterator[Report]:
    """JSON lines on request, a live view in a terminal, log lines elsewhere.

    With `quiet` nothing is shown, or as JSON only the result. A live view asks which metrics are
    its `headlines`.
    """
    if as_json:
        report = json_lines(sys.stdout)

        def report_results(event: AnyEvent) -> None:
            if isinstance(event, Result):
                report(event)

        chosen = report_results if quiet else report
        yield chosen
    elif quiet:
        yield ignore
    elif sys.stderr.isatty() and (console := Console(stderr=True)).is_interactive:
        with live(console, headlines()) as report:
            yield report
    else:
        yield log_lines(sys.stderr)
