"""How far a grid is: what is left, how long that takes, what failed."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from broker_config.protocol.errors import explain

C = TypeVar("C")  # cell
K = TypeVar("K", bound=Hashable)  # kind of work
M = TypeVar("M")  # material
R = TypeVar("R")  # result


class State(msgspec.Struct, frozen=True):
    """How far an experiment is."""

    cells: int
    missing: int
    seconds: float | None  # that the missing ones will take, where that can be judged


class Failed(NamedTuple, Generic[C]):
    """A cell that came to nothing."""

    cell: C
    error: str


def attempt(run: Callable[[C, M], R], cell: C, material: M) -> R | Failed[C]:
    """Run a cell; what goes wrong with it is part of the outcome."""
    try:
        return run(cell, material)
    except Exception as error:  # one cell must not stop the others
        return Failed(cell, explain(error).what)


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
