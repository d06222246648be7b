"""Processes of this machine that share work, and end when this one does, however that ends."""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from tempfile import TemporaryFile
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from broker_config.protocol.errors import EdgeNodeError, explain

J = TypeVar("J")  # job
M = TypeVar("M")  # inputs
R = TypeVar("R")  # result

_task: tuple[Callable[[Any, Any], Any], Any]  # of a worker process: work and inputs


class Failed(NamedTuple, Generic[J]):
    """A cell that could not be run."""

    cell: J
    error: str


def attempt(run: Callable[[J, M], R], cell: J, inputs: M) -> R | Failed[J]:
    """Run a cell; what goes wrong with it is part of the outcome."""
    try:
        return run(cell, inputs)
    except Exception as error:  # one cell must not stop the others
        return Failed(cell, explain(error).what)


def over_processes(
    workers: int, work: Callable[[J, M], R], jobs: Sequence[J], inputs: M
) -> Iterator[R]:
    """The results of `work` (a function of a module) for each job, as they come;
    a thread for each process.
    """
    # a worker that dies while it starts cannot block us, as with a pipe
    with TemporaryFile() as file:
        pickle.dump((work, inputs), file)
        file.flush()
        place = f"/proc/{os.getpid()}/fd/{file.fileno()}"  # it has no name that could outlive us
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (place,))
        try:
            with _signals_deferred():
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
def _signals_deferred() -> Iterator[None]:
    """Signals wait until the block is left; processes that start in it never get them:
    their parent decides.
    """
    deferred, received = (signal.SIGINT, signal.SIGTERM), list[int]()
    handlers = {
        each: signal.signal(each, lambda number, _: received.append(number)) for each in deferred
    }
    # the mask is inherited; our other threads still get signals
    signal.pthread_sigmask(signal.SIG_BLOCK, deferred)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, deferred)
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for number in received:
        signal.raise_signal(number)


def _start(place: str) -> None:
    """Prepare a worker process; it ends when its parent does, however that ends."""
    global _task  # noqa: PLW0603
    with open(place, "rb") as file:  # noqa: PTH123  (a pathlib.Path would resolve the link)
        _task = pickle.load(file)  # noqa: S301  (our parent wrote it)
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)


def _follow_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(job: Any) -> Any:
    work, inputs = _task
    return work(job, inputs)
