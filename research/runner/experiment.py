"""One experiment of a paper: what is missing of its grid, how long that takes, running it,
its tables and figure.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple

import msgspec
from rich.console import Console

from broker_config.protocol.errors import UsageError, suggest
from edge.terminal.formatting import format_remaining, pluralize
from research.runner import style
from research.runner.cluster import over_cluster
from research.runner.machine import machine, suited_workers
from research.runner.paper import C, F, O, Paper
from research.runner.processes import Failed, attempt, over_processes
from research.runner.store import Records
from trainer import progress
from trainer.federation.simulation import check_device


class State(msgspec.Struct, frozen=True):
    """How far an experiment is."""

    cells: int
    missing: int
    seconds: float | None  # that the missing ones will take, where that can be estimated


class Repeated(NamedTuple, Generic[F]):
    """A finished cell, and what it has reached when it was run again."""

    stored: F
    now: F

    @property
    def is_same(self) -> bool:
        """Whether all but the time and the machine is the same, to the last digit."""
        there, here = (msgspec.to_builtins(each) for each in self)
        for each in (there, here):
            del each["seconds"], each["machine"]
        return bool(there == here)


class Experiment(Generic[O, C, F]):
    """A grid of cells, some of them finished already."""

    def __init__(self, paper: Paper[O, C, F], order: O, show: progress.Report):
        """Read the data.

        Raises:
            UsageError: what cannot be, and what to do instead.
        """
        _check(paper, order)
        self._paper, self._order = paper, order
        self._records = Records(order.store / "cells.jsonl", paper.finished)
        self._grid = paper.plan(order, self._records, show)
        self.cells = self._grid.cells
        self._workers, self._machine = (
            order.workers or suited_workers(order.device),
            machine(order.device),
        )

    def inputs(self, cells: Collection[C]) -> Any:
        """What these cells of it need; images are decoded now."""
        return self._grid.inputs(cells)

    def finished(self) -> dict[str, F]:
        """All that is finished in the store, by key; of equal keys the first."""
        found: dict[str, F] = {}
        for each in self._records:
            found.setdefault(each.key, each)
        return found

    def missing(self) -> list[C]:
        """The cells that are not finished."""
        finished = self.finished()
        return [cell for cell in self.cells if cell.key not in finished]

    def state(self) -> State:
        """How far it is."""
        missing = self.missing()
        return State(len(self.cells), len(missing), self._estimate(missing))

    def describe(self, state: State) -> str:
        """How far it is, in words."""
        done = (
            f"{state.cells - state.missing} of {pluralize(state.cells, 'cell')} finished in "
            f"{self._order.store}"
        )
        if not state.missing:
            return done
        if state.seconds is None:
            return f"{done}; how long the rest takes is known once some of each kind has been run"
        return (
            f"{done}; the rest takes {format_remaining(state.seconds)} with "
            f"{pluralize(self._workers, 'worker')}"
        )

    def run(self, show: progress.Report) -> list[Failed[C]]:
        """Run what is missing, storing each result as it comes; returns what failed,
        which is tried again next time.
        """
        left = {cell.key: cell for cell in self.missing()}
        total, failed = len(left), []
        show(progress.Step(what=f"{total} of {len(self.cells)} cells to run"))
        if not left:
            return []
        cells = list(left.values())
        work, inputs = partial(attempt, self._paper.run_cell), self.inputs(cells)
        if self._order.ray:
            outcomes = over_cluster(self._order.ray, work, cells, inputs)
        else:
            outcomes = over_processes(self._workers, work, cells, inputs)
        with closing(outcomes):  # type: ignore[type-var]
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    del left[outcome.cell.key]
                    failed.append(outcome)
                    show(
                        progress.Note(
                            text=f"failed: {self._paper.describe(outcome.cell)}: {outcome.error}"
                        )
                    )
                    continue
                self._records.add(outcome)
                cell = left.pop(outcome.key)
                event = progress.CellFinished(
                    done=total - len(left),
                    total=total,
                    cell=self._paper.describe(cell),
                    seconds=outcome.seconds,
                    left=self._estimate(left.values()),
                    **self._paper.metrics(outcome),
                )
                show(event)
        return failed

    def run_again(self, key: str) -> Repeated[F]:
        """Run a finished cell again, and store nothing; the beginning of its key will do.

        Raises:
            UsageError: no finished cell of the experiment has that key, or several have.
        """
        finished = self.finished()
        found = [cell for cell in self.cells if cell.key in finished and cell.key.startswith(key)]
        if len(found) != 1:
            raise UsageError(
                f"{len(found)} finished cells of {self._order.name} have a key that begins with "
                f"{key!r}",
                f"give one of {self._order.store / 'cells.jsonl'}, with the data, weights, "
                "preset and torch of its run",
            )
        [cell] = found
        return Repeated(finished[cell.key], self._paper.run_cell(cell, self.inputs(found)))

    def describe_again(self, outcome: Repeated[F]) -> str:
        """What came of that, in words."""
        there, here = (
            ", ".join(
                f"{name} {value:.4f}"
                for name, value in self._paper.metrics(each).items()
                if value is not None
            )
            for each in outcome
        )
        what = self._paper.describe(outcome.stored.cell)
        if outcome.is_same:
            return f"{what}: {there}, the same as stored, to the last digit"
        return (
            f"{what}: {there} is stored, by {outcome.stored.machine}; {here} here, by "
            f"{outcome.now.machine}"
        )

    def report(self, console: Console) -> list[Path]:
        """Print its tables, draw its figure, and return the files that it has written.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        name, folder, title = (
            self._order.name,
            self._order.store,
            self._paper.titles[self._order.name],
        )
        # other settings: beside the table of the usual ones
        if self._order.preset not in ("quick", "cpu"):
            name, title = f"{name}_{self._order.preset}", f"{title} (preset {self._order.preset})"
        keys = {cell.key for cell in self.cells}
        finished = {key: each for key, each in self.finished().items() if key in keys}
        if not finished:
            return []
        report = self._grid.report(finished)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(report.markdown(title))
        for table in report.tables:
            console.print(table.rich())
        console.print(" ".join(report.paragraphs), markup=False, highlight=False)
        if not report.draw:
            return [folder / f"{name}.md"]
        style.write(report.draw, folder / f"{name}.svg")
        return [folder / f"{name}.md", folder / f"{name}.svg"]

    def _estimate(self, cells: Iterable[C]) -> float | None:
        """Seconds that cells will take, from those of their kinds that this machine has run;
        None if it has none.
        """
        seconds, done = defaultdict[Any, float](float), defaultdict[Any, float](float)
        for each in self.finished().values():
            if each.machine == self._machine:
                kind, amount = self._paper.work(each.cell)
                seconds[kind] += each.seconds
                done[kind] += amount
        left = [self._paper.work(cell) for cell in cells]
        if not all(done[kind] for kind, _ in left):
            return None
        return sum(amount * seconds[kind] / done[kind] for kind, amount in left) / self._workers


def _check(paper: Paper[O, C, F], order: O) -> None:
    if order.name not in paper.titles:
        raise UsageError(
            f"there is no experiment {order.name!r}", suggest(order.name, paper.titles)
        )
    if not order.data:
        raise UsageError(
            "an experiment needs data", f"pass --data NAME=PATH, NAME of {', '.join(paper.data)}"
        )
    for name in order.data:
        if name not in paper.data:
            raise UsageError(f"there is no data set {name!r}", suggest(name, paper.data))
    check_device(order.device)
    if order.ray and order.device != "cpu":
        raise UsageError(
            "workers of a Ray cluster train on its processors", "leave out --device or --ray"
        )
