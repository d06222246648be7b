"""How far a grid is: what is left, how long that takes, what failed."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

import msgspec

C = TypeVar("C")  # cell
K = TypeVar("K", bound=Hashable)  # kind of work


class State(msgspec.Struct, frozen=True):
    """How far an experiment is."""

    cells: int
    missing: int
    seconds: float | None  # that the missing ones will take, where that can be judged


class Failed(NamedTuple, Generic[C]):
    """A cell that came to nothing."""

    cell: C
    error: str


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
