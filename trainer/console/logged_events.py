"""Events of a state folder's log, added to the histories of its runs."""

from collections.abc import Mapping
from pathlib import Path

from trainer.console.run_history import RunHistory
from trainer.progress import (
    Activity,
    AnyEvent,
    Contribution,
    FederationFinished,
    Gathering,
    Late,
    Measured,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Note,
    Paused,
    RoundClosed,
    RoundOpened,
    event_log,
    format_event,
)


class LoggedEvents:
    """A log that is followed as it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = 0  # as far as it was read
        self._read: list[event_log.Logged] = []  # and not applied so far
        self._run = ""  # that the log is about

    def read(self) -> None:
        """Read what is new. OSError if it cannot be read."""
        logged, self._end = event_log.read(self._folder, self._end)
        self._read += logged

    def apply(self, runs: Mapping[str, RunHistory]) -> bool:
        """Add what was read to the runs; whether there was anything.

        Of a run that is not known nothing is told.
        """
        logged = self._read
        self._read = []
        for time, event in ((each.time, each.event) for each in logged):
            if isinstance(event, Gathering):
                self._run = event.run
            if run := runs.get(self._run):
                for take in (_put_values, _set_status, _tell):
                    take(run, time, event)
        return bool(logged)


def _put_values(run: RunHistory, time: float, event: AnyEvent) -> None:
    match event:
        case Activity(what="sending", node=node, round=round_):
            run.elapsed(round_, node, "offered", time)
        case Contribution(node=node, round=round_):
            run.elapsed(round_, node, "counted", time)
        case Measured(node=node, round=round_, metrics=metrics):
            run.put(round_, node, metrics)
        case NodeLost(node=node, round=round_):
            run.elapsed(round_, node, "absent", time)
        case NodeRefused(node=node, round=round_) if node in run.status:
            run.elapsed(round_, node, "refused", time)
        case RoundOpened(round=round_):
            for node, status in run.status.items():
                if status.doing in ("absent", "refused"):
                    run.elapsed(round_, node, status.doing, time)
        case NodeJoined(node=node):
            run.come_back(node)
        case RoundClosed(round=round_):
            run.row(round_).whole |= {"bytes_up": event.bytes_up, "bytes_down": event.bytes_down}


def _set_status(run: RunHistory, time: float, event: AnyEvent) -> None:
    match event:
        case Gathering():  # whoever is there will say so
            run.begun = run.begun or time
            for node in run.nodes:
                if run.status[node].doing != "refused":
                    run.set_status(node, "absent", time)
        case Activity(node=node, what=what):
            run.set_status(node, what, time)
        case NodeJoined(node=node):
            run.set_status(node, "waiting", time)
        case NodeLost(node=node):
            run.set_status(node, "absent", time, format_event(event))
        case NodeRefused(node=node) if node in run.status:
            run.set_status(node, "refused", time, format_event(event))
        case Late(node=node) if node in run.status:
            run.set_status(node, run.status[node].doing, time, format_event(event))
        case Paused() | RoundOpened():
            run.paused = isinstance(event, Paused)


def _tell(run: RunHistory, time: float, event: AnyEvent) -> None:
    match event:
        case NodeRefused(node=node):
            run.tell(time, format_event(event), "error", node)
        case Late(node=node) | NodeLost(node=node):
            run.tell(time, format_event(event), "warning", node)
        case Paused():
            run.tell(time, format_event(event), "warning")
        case NodeJoined(node=node):
            run.tell(time, format_event(event), node=node)
        case Note() | FederationFinished():
            run.tell(time, format_event(event))
