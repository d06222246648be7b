"""A Ray cluster that exists already, whose machines share the cells of a grid."""

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

import broker_config
import edge
import research
import trainer
from broker_config.protocol.errors import UsageError
from research.runner.processes import Failed
from trainer.models.weights_package import PACKAGE

C = TypeVar("C")  # cell
M = TypeVar("M")  # inputs
R = TypeVar("R")  # result


def over_cluster(
    address: str, work: Callable[[C, M], R], cells: Sequence[C], inputs: M
) -> Iterator[R | Failed[C]]:
    """The results of `work` (picklable), as they come, from the cluster at `address`
    (host:port; auto: this machine's).

    Inputs, our code and its weights travel there; its machines need Python and the packages of
    edge-node[train,research].
    """
    import ray  # noqa: PLC0415  (an extra, and slow)

    _connect(ray, address)
    waiting: dict[Any, C] = {}
    try:
        task, shared = ray.remote(num_cpus=1)(_call), ray.put(inputs)
        waiting = {task.remote(work, cell, shared): cell for cell in cells}
        while waiting:
            (done,), _ = ray.wait([*waiting])
            yield _outcome(ray, done, waiting.pop(done))
    finally:
        for each in waiting:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(each, force=True)
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    try:
        if address != "auto":
            _check_listening(address)
        weights = importlib.import_module(PACKAGE)
        code = {"py_modules": [broker_config, edge, research, trainer, weights]}
        ray.init(address=address, runtime_env=code, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UsageError(
            f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}",
            "start one with ray start --head, and pass its HOST:PORT; its Python and Ray must be "
            "this machine's",
        ) from error


def _check_listening(address: str) -> None:
    """Raise OSError or ValueError if nobody listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        pass


def _outcome(ray: Any, done: Any, cell: C) -> Any:
    try:
        return ray.get(done)
    except ray.exceptions.RayError as error:
        return Failed(cell, f"a machine of the cluster was lost: {str(error).splitlines()[0]}")


def _call(work: Callable[[C, M], R], cell: C, inputs: M) -> R:
    torch.set_num_threads(1)
    return work(cell, inputs)
