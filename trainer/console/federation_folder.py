"""State folder of a coordinator, followed as it grows: facts of its journal,
and what else its log of events has.
"""

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Spec
from edge.terminal.formatting import natural_key
from trainer.console.logged_events import LoggedEvents
from trainer.console.run_history import Description, Measure, RunHistory
from trainer.federation.server import journal
from trainer.federation.server.operator_actions import Action, ActionReader
from trainer.federation.server.spec import flat_settings
from trainer.methods import make

# the page has words for these
_OWN = ("accuracy", "accuracy_all", "weight", "bytes", "offered", "counted", "absent", "refused")


class FederationFolder:
    """The runs in a coordinator's state folder, the newest last.

    Reading never waits for the coordinator, and keeps it waiting for less than a millisecond a
    round.
    """

    FILE: ClassVar = journal.Journal.FILE

    def __init__(self, folder: Path) -> None:
        """UsageError if there is no journal in `folder`; EdgeNodeError if it is damaged."""
        journal.history(folder)  # verifies it, once
        self.folder = folder
        self.runs: dict[str, RunHistory] = {}
        self._seen = (0, 0)  # of the journal: when it was changed, and how long it was
        # by run: the first round that may have changed since it was read
        self._open: dict[str, int] = {}
        self._log = LoggedEvents(folder)
        self._actions: dict[str, ActionReader] = {}  # by run

    def refresh(self) -> bool:
        """Read what is new; whether there was anything.

        Raises:
            UsageError, EdgeNodeError: the journal is not there any more, or cannot be read.
            OSError: nor can the log.
        """
        self._log.read()  # first: what it is about is in the journal by then
        is_changed = self._read_journal()
        return self._log.apply(self.runs) | self._read_actions() | is_changed

    def _read_journal(self) -> bool:
        found = (self.folder / journal.Journal.FILE).stat()
        if self._seen == (seen := (found.st_mtime_ns, found.st_size)):
            return False
        self._seen = seen
        for record in journal.runs(self.folder):
            run = self.runs.setdefault(record.spec.run, RunHistory(_describe(record)))
            if run.stage in ("finished", "aborted") and record.finished <= _done(run):
                continue
            self._read_rounds(run)
            run.ended = _seconds(record.ended) if record.ended else None
            if record.outcome:
                run.stage = record.outcome
            else:
                run.stage = "open" if run.newest else "gathering"
            for node in sorted(record.finished - _done(run)):
                run.set_status(node, "finished", run.ended or 0.0)
            run.touch()
        return True

    def _read_rounds(self, run: RunHistory) -> None:
        for each in journal.rounds_since(
            self.folder, run.about.id, self._open.get(run.about.id, 0)
        ):
            row = run.row(each.round, _seconds(each.opened))
            row.closed = _seconds(each.closed) if each.closed else None
            if row.closed:
                row.whole["seconds"] = round(row.closed - row.opened, 3)
            for node, (weight, size) in sorted(
                each.contributions.items(), key=lambda each: natural_key(each[0])
            ):
                run.put(each.round, node, {"weight": weight, "bytes": size})
            self._open[run.about.id] = each.round

    def _read_actions(self) -> bool:
        """What its operator wants of the newest run."""
        id_, run = next(reversed(self.runs.items()), ("", None))
        actions: list[Action] = []
        with suppress(EdgeNodeError):  # who acts is told; the page shows what it knows
            actions = self._actions.setdefault(id_, ActionReader(self.folder, id_)).read()
        for action in actions:
            if run and action.what in ("pause", "resume"):
                run.held = action.what == "pause"
                run.touch()
        return bool(actions)


def _describe(record: journal.RunRecord) -> Description:
    spec = record.spec
    return Description(
        id=spec.run,
        kind="federation",
        federation=spec.federation,
        method=spec.method,
        rounds=spec.rounds,
        places=spec.nodes,
        settings=flat_settings(spec),
        measures=_measures(spec),
        begun=_seconds(record.begun),
    )


def _measures(spec: Spec) -> tuple[Measure, ...]:
    """What nodes may tell, in the order of the charts;
    of a method that this version has not, what all have.
    """
    try:
        method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    except UsageError:
        return tuple(map(Measure, _OWN))
    meaning = f"As each node measured it: {method.weight_meaning}."
    if spec.mask_threshold:
        meaning = "Behind masks: 1 stands for what the node alone knows."
    named = {"weight": Measure("weight", "", meaning)}
    explained = (Measure(each.key, each.title, each.meaning, each.level) for each in method.metrics)
    return (*(named.get(key, Measure(key)) for key in _OWN), *explained)


def _done(run: RunHistory) -> set[str]:
    return {node for node, status in run.status.items() if status.doing == "finished"}


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
