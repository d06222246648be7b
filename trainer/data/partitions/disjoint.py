"""Classes for each node, classes_per_node of them, dealt from a deck,
or drawn for each (deal=random).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from numpy.random import Generator

from trainer.data.partitions.partition_rule import Partition, check_classes, count_evenly


class Disjoint(Partition, frozen=True):
    """Label skew: each node has few classes, evenly."""

    name = "disjoint"

    classes_per_node: Annotated[int, msgspec.Meta(ge=1)] = 2
    # deck: every class is somebody's before one is dealt again; random: drawn for each node by
    # itself, so that nodes share more classes, and some are nobody's (Cui et al., 2024)
    deal: Literal["deck", "random"] = "deck"

    def check(
        self,
        sources: Sequence[Sequence[str]],
        nodes: int,  # noqa: ARG002
        samples: int,
    ) -> None:
        """There must be so many classes, and an image of each."""
        for classes in sources:
            check_classes(self.classes_per_node, classes, samples)

    def count(
        self, classes: Sequence[str], nodes: int, samples: int, random: Generator
    ) -> list[Counter[str]]:
        """Classes are dealt from shuffled decks, or drawn for each node."""
        if self.deal == "random":
            drawn = (
                random.choice(classes, self.classes_per_node, replace=False) for _ in range(nodes)
            )
            mines: list[Counter[str]] = []
            for own in drawn:
                mines.append(count_evenly([str(name) for name in own], samples))
            return mines
        deck: list[str] = []
        counts = []
        for _ in range(nodes):
            mine: list[str] = []
            while len(mine) < self.classes_per_node:
                if not [name for name in deck if name not in mine]:
                    deck += [str(name) for name in random.permutation(classes)]
                name = next(name for name in deck if name not in mine)
                deck.remove(name)
                mine.append(name)
            counts.append(count_evenly(mine, samples))
        return counts
