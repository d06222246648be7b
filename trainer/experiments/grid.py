"""Running many cells, here or elsewhere; what is finished is stored at once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from broker_config.errors import explain
from trainer import progress
from trainer.experiments.bench import Material
from trainer.experiments.cell import Cell, Finished
from trainer.experiments.machine import machine
from trainer.experiments.processes import over_processes
from trainer.experiments.run import Done, run_cell
from trainer.experiments.store import Store
from trainer.experiments.tally import Failed, judge


class Job(NamedTuple):
    """A cell to run."""

    cell: Cell
    embed: bool = False  # whether features are wanted in two dimensions


Outcome = Done | Failed[Cell]
Spread = Callable[[Sequence[Job], Material], Iterator[Outcome]]
"""Runs jobs, in whatever place and order. Closed early, it leaves nothing running."""


def run_grid(
    jobs: Sequence[Job], material: Material, store: Store, spread: Spread, workers: int, show: progress.Report
) -> list[Failed[Cell]]:
    """Run the jobs, store each result as it comes, and return what failed.

    A failure is not stored: it is tried again when the grid is run again.
    """
    finished = list(store.finished().values())
    left = {job.cell.key: job.cell for job in jobs}
    failed = []
    with closing(spread(jobs, material)) as outcomes:  # type: ignore[type-var]
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                failed.append(outcome)
                del left[outcome.cell.key]
                show(progress.Note(text=f"failed: {describe(outcome.cell)}: {outcome.error}"))
                continue
            store.add(*outcome)
            finished.append(outcome.finished)
            del left[outcome.finished.key]
            show(
                progress.CellFinished(
                    done=len(jobs) - len(left),
                    total=len(jobs),
                    cell=describe(outcome.finished.cell),
                    accuracy=outcome.finished.mean("accuracy"),
                    seconds=outcome.finished.seconds,
                    left=estimate(left.values(), finished, workers),
                )
            )
    return failed


def describe(cell: Cell) -> str:
    """A cell in words."""
    setting = cell.setting
    return f"{cell.method}, {setting.dataset} {setting.partition} {setting.samples}, {cell.model}, seed {cell.seed}"


def estimate(cells: Iterable[Cell], finished: Iterable[Finished], workers: int) -> float | None:
    """Seconds that the cells will take here, judged by those that were run here; None where nothing is known."""
    cells = list(cells)
    here = {machine(cell.device) for cell in cells}
    ran = [(_kind(each.cell), _work(each.cell), each.seconds) for each in finished if each.machine in here]
    return judge([(_kind(cell), _work(cell)) for cell in cells], ran, workers)


def _kind(cell: Cell) -> tuple[str, int]:
    return cell.model, cell.size


def _work(cell: Cell) -> float:
    return cell.rounds * cell.setting.nodes * cell.setting.samples


def in_processes(workers: int) -> Spread:
    """Spreads jobs over processes of this machine."""

    def spread(jobs: Sequence[Job], material: Material) -> Iterator[Outcome]:
        return over_processes(workers, attempt, jobs, material)

    return spread


def attempt(job: Job, material: Material) -> Outcome:
    """Run a cell; what goes wrong with it is part of the outcome."""
    try:
        return run_cell(job.cell, material, embed=job.embed)
    except Exception as error:  # one cell must not stop the others
        return Failed(job.cell, explain(error).what)
