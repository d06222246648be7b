"""Cells of any kind, some of them finished already: what is missing, how long that takes, and running it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console

from edge.terminal.formatting import format_remaining, pluralize
from research.runner.machine import machine, suited_workers
from research.runner.processes import over_processes
from research.runner.store import Records
from research.runner.tally import Failed, State, attempt, judge
from trainer import progress
from trainer.training.simulation import Device


class Keyed(Protocol):
    """A cell."""

    @property
    def key(self) -> str:
        """What its result is found by."""
        ...


C = TypeVar("C", bound=Keyed)


class Record(Protocol):
    """A finished cell."""

    @property
    def key(self) -> str:
        """The cell's."""
        ...

    @property
    def cell(self) -> Any:
        """What was run."""
        ...

    @property
    def seconds(self) -> float:
        """That it took."""
        ...

    @property
    def machine(self) -> str:
        """Where."""
        ...


F = TypeVar("F", bound=Record)
Work = tuple[Hashable, float]
"""A kind of work, and how much of it."""


class Cells(ABC, Generic[C, F]):
    """A grid of cells. A subclass says what its cells are."""

    def __init__(self, cells: Sequence[C], records: Records[Any], folder: Path, workers: int, device: Device = "cpu"):
        """With the results so far, which lie in the folder, and the number of processes; 0 = as suits the device."""
        self.cells, self._records, self.folder = cells, records, folder
        self._workers, self._machine = workers or suited_workers(device), machine(device)

    @abstractmethod
    def _task(self) -> tuple[Callable[[C, Any], Any], Any]:
        """A function of a module that runs a cell, and the material that it takes for those that are missing."""

    @abstractmethod
    def _told(self, cell: C) -> str:
        """A cell in words."""

    @abstractmethod
    def _figures(self, finished: F) -> dict[str, float | None]:
        """What a finished cell reached: fields of `CellFinished`."""

    @abstractmethod
    def _work(self, cell: C) -> Work:
        """By which the time of a cell is judged."""

    @abstractmethod
    def tell(self, console: Console) -> list[Path]:
        """Print its tables, draw its figures, and return the files that it has written."""

    def _spread(self, work: Callable[[C, Any], Any], cells: Sequence[C], material: Any) -> Iterator[Any]:
        """What work gives for each cell, as it comes; closed early it leaves nothing running."""
        return over_processes(self._workers, work, cells, material)

    def _keep(self, done: Any) -> F:
        """Store what has come of a cell, and return its record."""
        self._records.add([done])
        finished: F = done
        return finished

    def missing(self) -> list[C]:
        """What is not finished."""
        there = self.finished()
        return [cell for cell in self.cells if cell.key not in there]

    def finished(self) -> dict[str, F]:
        """All that is finished in the store, by key; of equal keys the first."""
        found: dict[str, Any] = {}
        for each in self._records:
            found.setdefault(each.key, each)
        return found

    def state(self) -> State:
        """How far it is."""
        missing = self.missing()
        return State(len(self.cells), len(missing), self._estimate(missing))

    def describe(self, state: State) -> str:
        """That in words."""
        done = f"{state.cells - state.missing} of {pluralize(state.cells, 'cell')} finished in {self.folder}"
        if not state.missing:
            return done
        if state.seconds is None:
            return f"{done}; how long the rest takes is known once some of each kind has been run"
        return f"{done}; the rest takes {format_remaining(state.seconds)} with {pluralize(self._workers, 'worker')}"

    def run(self, show: progress.Report) -> list[Failed[C]]:
        """Run what is missing, storing each result as it comes; returns what failed, which is tried again next time."""
        left = {cell.key: cell for cell in self.missing()}
        total, failed = len(left), []
        show(progress.Step(what=f"{total} of {len(self.cells)} cells to run"))
        if not left:
            return []
        task, material = self._task()
        with closing(self._spread(partial(attempt, task), list(left.values()), material)) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    del left[outcome.cell.key]
                    failed.append(outcome)
                    show(progress.Note(text=f"failed: {self._told(outcome.cell)}: {outcome.error}"))
                    continue
                finished = self._keep(outcome)
                cell = left.pop(finished.key)
                event = progress.CellFinished(
                    done=total - len(left),
                    total=total,
                    cell=self._told(cell),
                    seconds=finished.seconds,
                    left=self._estimate(left.values()),
                    **self._figures(finished),
                )
                show(event)
        return failed

    def _estimate(self, cells: Iterable[C]) -> float | None:
        ran = [
            (*self._work(each.cell), each.seconds) for each in self.finished().values() if each.machine == self._machine
        ]
        return judge([self._work(cell) for cell in cells], ran, self._workers)
