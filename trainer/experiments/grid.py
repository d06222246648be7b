"""Running many cells, here or elsewhere; what is finished is stored at once."""

import os
import pickle
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import active_children, get_context, parent_process
from tempfile import TemporaryFile
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from broker_config.errors import EdgeNodeError, explain
from trainer import progress
from trainer.experiments.bench import Material
from trainer.experiments.cell import Cell, Finished
from trainer.experiments.run import Done, machine, run_cell
from trainer.experiments.store import Store

C = TypeVar("C")  # cell
J = TypeVar("J")  # job
K = TypeVar("K", bound=Hashable)  # kind of work
M = TypeVar("M")  # material
R = TypeVar("R")  # result


class Job(NamedTuple):
    """A cell to run."""

    cell: Cell
    embed: bool = False  # whether features are wanted in two dimensions


class Failed(NamedTuple, Generic[C]):
    """A cell that came to nothing."""

    cell: C
    error: str


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
    ran = [(_kind(each.cell), _work(each.cell), each.seconds) for each in finished if each.machine == machine()]
    return judge([(_kind(cell), _work(cell)) for cell in cells], ran, workers)


def judge(left: Iterable[tuple[K, float]], ran: Iterable[tuple[K, float, float]], workers: int) -> float | None:
    """Seconds for what is left (kind and work of each), judged by what ran (kind, work, seconds); None if unknown."""
    seconds, work = defaultdict[K, float](float), defaultdict[K, float](float)
    for kind, amount, took in ran:
        seconds[kind] += took
        work[kind] += amount
    total = 0.0
    for kind, amount in left:
        if not work[kind]:
            return None
        total += amount * seconds[kind] / work[kind]
    return total / workers


def _kind(cell: Cell) -> tuple[str, int]:
    return cell.model, cell.size


def _work(cell: Cell) -> float:
    return cell.rounds * cell.setting.nodes * cell.setting.samples


# In processes


def in_processes(workers: int) -> Spread:
    """Spreads jobs over processes of this machine."""

    def spread(jobs: Sequence[Job], material: Material) -> Iterator[Outcome]:
        return over_processes(workers, attempt, jobs, material)

    return spread


_given: tuple[Callable[[Any, Any], Any], Any]  # to a worker process: work and material


def over_processes(workers: int, work: Callable[[J, M], R], jobs: Sequence[J], material: M) -> Iterator[R]:
    """What `work` (a function of a module) gives for each job and the material; a thread for each process."""
    with TemporaryFile() as file:  # a worker that dies while it starts cannot block us, as with a pipe
        pickle.dump((work, material), file)
        file.flush()
        place = f"/proc/{os.getpid()}/fd/{file.fileno()}"  # it has no name that could outlive us
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (place,))
        try:
            with _unasked():
                futures = [pool.submit(_call, job) for job in jobs]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise EdgeNodeError(
                "a worker process was killed, perhaps for want of memory",
                "run it again with fewer --workers; what is finished is stored",
            ) from error
        finally:
            for process in active_children():
                process.kill()
            pool.shutdown(cancel_futures=True)


@contextmanager
def _unasked() -> Iterator[None]:
    """Signals wait until the block is left; processes that start in it never get them: their parent decides."""
    asking, asked = (signal.SIGINT, signal.SIGTERM), list[int]()
    handlers = {each: signal.signal(each, lambda number, _: asked.append(number)) for each in asking}
    signal.pthread_sigmask(signal.SIG_BLOCK, asking)  # the mask is inherited; our other threads still get signals
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asking)
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for number in asked:
        signal.raise_signal(number)


def _begin(place: str) -> None:
    """Prepare a worker process, which ends when its parent does, however that ends."""
    global _given  # noqa: PLW0603
    with open(place, "rb") as file:  # noqa: PTH123  (a pathlib.Path would resolve the link)
        _given = pickle.load(file)  # noqa: S301  (our parent wrote it)
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)


def _follow_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(job: Any) -> Any:
    work, material = _given
    return work(job, material)


def attempt(job: Job, material: Material) -> Outcome:
    """Run a cell; what goes wrong with it is part of the outcome."""
    try:
        return run_cell(job.cell, material, embed=job.embed)
    except Exception as error:  # one cell must not stop the others
        return Failed(job.cell, explain(error).what)
