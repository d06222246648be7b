"""A partition's rule: how many training images of which class each node gets."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
from numpy.random import Generator

from broker_config.protocol.errors import UsageError


class Partition(msgspec.Struct, frozen=True):
    """A rule. Its fields are its options, each with a default.

    Which images they are, what is held out and where look-alikes go is the same for all:
    `trainer/data/partition.py`.
    """

    name: ClassVar[str]
    # until it counts as impossible; more than one where a draw decides how many of a class
    draws: ClassVar[int] = 1

    def check(self, sources: Sequence[Sequence[str]], nodes: int, samples: int) -> None:
        """Raise UsageError unless sources of these classes can be had by nodes that are dealt to
        them in turn.
        """

    def count(
        self, classes: Sequence[str], nodes: int, samples: int, random: Generator
    ) -> list[Counter[str]]:
        """The training images of each node by class, `samples` in all;
        a class of which it has none is left out.
        """
        raise NotImplementedError

    def within_source(self) -> "Partition | None":
        """How the nodes of one source share it; None where all sources are shared as one,
        by `count`.
        """
        return None


def split_evenly(total: int, parts: int) -> list[int]:
    """`total` in equal parts; what cannot be split goes to the first, one each."""
    return round_to_total(np.full(parts, total / parts), total)


def round_to_total(shares: np.ndarray, total: int) -> list[int]:
    """Whole numbers that add up to `total`, by largest remainders."""
    counts = np.floor(shares + 1e-9).astype(int)
    largest = np.argsort(-(shares - counts), kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return [int(count) for count in counts]


def count_evenly(classes: Sequence[str], samples: int) -> Counter[str]:
    """A node's training images, of these classes in equal parts;
    of the first classes one more, where need be.
    """
    return Counter(
        {name: n for name, n in zip(classes, split_evenly(samples, len(classes)), strict=True) if n}
    )


def check_classes(each: int, classes: Sequence[str], samples: int) -> None:
    """Raise UsageError if there are too few classes, or images of a node,
    for so many classes of each node.
    """
    if each > min(len(classes), samples):
        raise UsageError(
            f"{each} classes for each node cannot be had from {len(classes)} classes, {samples} "
            "images a node",
            "pass fewer --classes-per-node",
        )
