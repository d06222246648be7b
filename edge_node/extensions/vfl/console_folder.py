"""State folder of a vertical federation's head, followed as it grows."""

from pathlib import Path
from typing import ClassVar

from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.server import journal
from trainer.console.logged_events import LoggedEvents
from trainer.console.run_history import Description, Measure, RunHistory

_MOST = 2000  # rounds that are kept of a run; of more every second, fourth, ...
_MEASURES = (
    "new_accuracy",
    "new_rmse",
    "loss",
    "rmse",
    "latency",
    "iterations",
    "seconds",
)  # the page has words for these


class VflFolder:
    """The runs in a head's state folder, the newest last."""

    FILE: ClassVar = journal.Journal.FILE

    def __init__(self, folder: Path) -> None:
        """UsageError if there is no journal in `folder`; EdgeNodeError if it is damaged."""
        journal.history(folder)  # verifies it, once
        self.folder = folder
        self.runs: dict[str, RunHistory] = {}
        self._seen = (0, 0)  # of the journal: when it was changed, and how long it was
        self._strides: dict[str, int] = {}  # by run
        self._clocks: dict[str, float] = {}  # by run: when the last round that was read was closed
        self._log = LoggedEvents(folder)

    def refresh(self) -> bool:
        """Read what is new; whether there was anything. Raises: as that of `FederationFolder`."""
        self._log.read()
        is_changed = self._read_journal()
        return self._log.apply(self.runs) | is_changed

    def _read_journal(self) -> bool:
        found = (self.folder / journal.Journal.FILE).stat()
        if self._seen == (seen := (found.st_mtime_ns, found.st_size)):
            return False
        self._seen = seen
        for record in journal.runs(self.folder):
            run = self.runs.setdefault(record.spec.run, RunHistory(_describe(record)))
            for closed in journal.rounds_since(self.folder, run.about.id, run.newest + 1):
                self._add(run, record.spec, closed)
            if record.ended:
                run.stage = "finished"
            elif run.newest:
                run.stage = "open"
            else:
                run.stage = "gathering"
            run.touch()
        return True

    def _add(self, run: RunHistory, spec: VflSpec, closed: journal.ClosedRound) -> None:
        id_ = run.about.id
        opened = self._clocks.get(id_, run.begun)
        self._clocks[id_] = opened + closed.seconds
        stride = self._strides.setdefault(id_, 1)
        run.newest = closed.round
        if closed.round > _MOST * stride:
            stride = self._strides[id_] = 2 * stride
            run.thin(stride)
        if closed.round % stride:
            return
        row = run.row(closed.round, opened)
        row.closed = self._clocks[id_]
        judged = closed.validation
        new_accuracy = judged.accuracy if judged else None
        new_rmse = judged.rmse if judged else None
        baseline = judged.baseline if judged else None
        found = {
            "loss": closed.loss,
            "rmse": closed.rmse,
            "new_accuracy": new_accuracy,
            "new_rmse": new_rmse,
            "baseline": baseline,
            "seconds": closed.seconds,
        }
        row.whole |= {key: value for key, value in found.items() if value is not None}
        for sensor, iterations in zip(spec.sensors, closed.iterations, strict=True):
            values = {"iterations": float(iterations)}
            if sensor in closed.collection:
                training = iterations * closed.iteration[sensor]
                values["latency"] = (
                    closed.collection[sensor] + closed.communication[sensor] + training
                )
            run.put(closed.round, sensor, values)


def _describe(record: journal.RunRecord) -> Description:
    spec = record.spec
    return Description(
        id=spec.run,
        kind="vfl",
        federation=spec.federation,
        method="DAO-VFL",
        rounds=0,
        places=len(spec.sensors),
        settings={
            "software": spec.software,
            "network": spec.network,
            "classes": len(spec.classes),
            "reading": spec.reading,
            "labels": spec.labels,
            "policy": spec.policy,
            "iterations": spec.iterations,
            "absent": spec.absent,
            "eta": spec.recipe.eta,
            "batches": spec.recipe.batches,
            "window.start": spec.window.start,
            "window.chunk": spec.window.chunk,
            "window.size": spec.window.size,
            "seed": spec.seed,
        },
        measures=tuple(map(Measure, _MEASURES)),
        begun=record.begun,
    )
