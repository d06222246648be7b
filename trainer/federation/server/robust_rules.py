"""A robust aggregation rule, which tolerates a bounded number of lying nodes. numpy only.

It is unweighted, since a node reports its own weight. Nodes are processed in the order of their
names, and values in float64, so that the result does not depend on the order of arrival.
Contributions are read again from disk when their round closes, a block of each at a time: memory
grows neither with the nodes nor with the model.

Variances stay non-negative: the rule's values lie between the least and the largest contribution.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from broker_config.protocol.codec import Rows, read_rows, read_tensors
from broker_config.protocol.messages import Aggregation, TensorSpec
from trainer.models.named_tensors import Arrays

VALUES = 1 << 22  # of all contributions together, in memory at once


class Source(Protocol):
    """A contribution, on disk or in memory."""

    def tensors(self) -> Iterable[tuple[str, np.ndarray]]:
        """Each tensor by its name, one at a time."""

    def read(self, parts: Sequence[Rows]) -> np.ndarray:
        """Read these rows as one vector."""

    def held(self) -> AbstractContextManager[None]:
        """Keep all tensors in memory meanwhile, so that several readers need not go to the disk
        each.
        """


class OnDisk:
    """A contribution in a safetensors file, with the tensors that it must contain."""

    def __init__(self, path: Path, expected: Mapping[str, TensorSpec]):
        self.path = path
        self._expected = expected
        self._held: Arrays = {}

    def tensors(self) -> Iterable[tuple[str, np.ndarray]]:  # noqa: D102  (Source's)
        return self._held.items() or read_tensors(self.path, self._expected)

    def read(self, parts: Sequence[Rows]) -> np.ndarray:  # noqa: D102
        return read_rows(self.path, parts)

    @contextmanager
    def held(self) -> Iterator[None]:  # noqa: D102
        self._held = dict(self.tensors())
        try:
            yield
        finally:
            self._held = {}


class InMemory(NamedTuple):
    """A contribution in memory."""

    arrays: Arrays

    def tensors(self) -> Iterable[tuple[str, np.ndarray]]:  # noqa: D102
        return self.arrays.items()

    def read(self, parts: Sequence[Rows]) -> np.ndarray:  # noqa: D102
        return np.concatenate(
            [np.atleast_1d(self.arrays[name])[start:stop].ravel() for name, start, stop in parts]
        )

    def held(self) -> AbstractContextManager[None]:  # noqa: D102
        return nullcontext()


class ContributionBlocks:
    """A round's contributions as matrices [nodes, values], block by block.

    Args:
        sources: one or more contributions, by node.
        broadcast: the tensors that they were trained from.
        values: the most values in memory at once, of all contributions together; at least a row of
            each.
    """

    def __init__(self, sources: Mapping[str, Source], broadcast: Arrays, values: int = VALUES):
        self._sources = [sources[node] for node in sorted(sources)]
        self._broadcast = InMemory(broadcast)
        self._blocks = list(_split_rows(broadcast, values // len(sources)))

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each block of the contributions, float32 [nodes, values],
        and of the broadcast, float32 [values].
        """
        for block in self._blocks:
            yield (
                np.stack([source.read(block) for source in self._sources]),
                self._broadcast.read(block),
            )

    def combine(self, rule: Callable[[np.ndarray], np.ndarray]) -> Arrays:
        """Apply a rule to each block, and assemble the results as float32 tensors."""
        whole = np.concatenate([rule(matrix).astype(np.float32) for matrix, _ in self])
        tensors = {}
        position = 0
        for name, array in sorted(self._broadcast.arrays.items()):
            tensors[name] = whole[position : position + array.size].reshape(array.shape)
            position += array.size
        return tensors


def _split_rows(tensors: Arrays, most: int) -> Iterator[list[Rows]]:
    """All rows in the order of the tensors' names, in blocks of at most `most` values
    (or one row).
    """
    block: list[Rows] = []
    room = most
    for name in sorted(tensors):
        rows, *rest = tensors[name].shape or (1,)
        start = 0
        width = prod(rest)
        while start < rows and width:
            if block and room < width:
                yield block
                block = []
                room = most
            stop = min(rows, start + max(1, room // width))
            block.append(Rows(name, start, stop))
            room = room - (stop - start) * width
            start = stop
    yield block


def multi_krum(contributions: ContributionBlocks, liars: int) -> Arrays:
    """Mean of the n - liars contributions with the nearest neighbours (Blanchard et al.,
    NeurIPS 2017).

    A contribution's score is the sum of its squared distances to its n - liars - 2 nearest; the
    lowest are chosen. The paper proves the rule for n >= 2 * liars + 3.
    """
    chosen = np.sort(_most_central(_squared_distances(contributions), liars))
    return contributions.combine(lambda matrix: _mean(matrix[chosen]))


def _squared_distances(contributions: ContributionBlocks) -> np.ndarray:
    """float64 [nodes, nodes]. From products of updates:
    those of whole models would cancel almost entirely.
    """
    products = np.zeros((len(contributions), len(contributions)))
    for matrix, start in contributions:
        updates = matrix - start.astype(np.float64)
        products += updates @ updates.T
    squares = np.diag(products)
    return np.maximum(squares[:, None] + squares - 2 * products, 0)


def _most_central(distances: np.ndarray, liars: int) -> np.ndarray:
    """Indices of the n - liars rows with the lowest scores; of equal scores the first ones."""
    count = len(distances)
    others = np.sort(distances + np.diag(np.full(count, np.inf)), axis=1)
    return np.argsort(others[:, : count - liars - 2].sum(1), kind="stable")[: count - liars]


def _mean(matrix: np.ndarray) -> np.ndarray:
    """Mean of the rows, added in order: the rounding of numpy's own sum depends on the matrix's
    width.
    """
    total = reduce(np.add, matrix[1:], matrix[0].astype(np.float64))
    return np.asarray(total / len(matrix))


class RobustRule(NamedTuple):
    """A rule and its requirements."""

    combine: Callable[[ContributionBlocks, int], Arrays]
    least: Callable[[int], int]  # contributions that it needs, given the number of liars


RULES = {
    "multi_krum": RobustRule(multi_krum, lambda liars: 2 * liars + 3),
}
"""All rules but `mean` and `clipped_mean`, which FixedPointSum computes."""


def aggregate(aggregation: Aggregation, sources: Mapping[str, Source], broadcast: Arrays) -> Arrays:
    """Aggregate contributions that were trained from `broadcast`, by one of RULES."""
    return RULES[aggregation.rule].combine(
        ContributionBlocks(sources, broadcast), aggregation.liars
    )
