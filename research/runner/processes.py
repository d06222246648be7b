"""Work spread over processes of this machine, which end when this one does, however that ends."""

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
from typing import Any, TypeVar

import torch

from broker_config.protocol.errors import EdgeNodeError

J = TypeVar("J")  # job
M = TypeVar("M")  # material
R = TypeVar("R")  # result

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
