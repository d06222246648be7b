"""Proportions of classes drawn for each node from Dir(alpha)."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.random import Generator

from trainer.data.partitions.partition_rule import Partition, round_to_total


class Dirichlet(Partition, frozen=True):
    """Label skew (Hsu et al., 2019)."""

    name = "dirichlet"
    draws = 200

    alpha: Annotated[float, msgspec.Meta(gt=0)] = 0.1  # concentration

    def count(
        self, classes: Sequence[str], nodes: int, samples: int, random: Generator
    ) -> list[Counter[str]]:
        """Each node's proportions, rounded to whole images."""
        rows = random.dirichlet(np.full(len(classes), self.alpha), nodes)
        counts = [zip(classes, round_to_total(row * samples, samples), strict=True) for row in rows]
        counters: list[Counter[str]] = []
        for row in counts:
            counters.append(Counter({name: n for name, n in row if n}))
        return counters
