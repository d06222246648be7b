"""Order and grouping of images that wait for a label: the most instructive first,
similar ones together.

`research/studies/labelling_order.py` measures what the order is worth.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# cosine to a group's first image from which on an image belongs to it: 94 % of a group are of one
# class
SIMILAR = 0.5


class SimilarityGroups:
    """Groups of images with similar features, made as they come: each joins the likest group,
    or begins one.
    """

    def __init__(self) -> None:
        # features of length one of each group's first image [groups, d]
        self._leaders: dict[str, Floats] = {}
        self._numbers: dict[str, list[int]] = {}  # of these groups
        self._count = 0

    def add(self, model: str, features: Floats | None) -> int:
        """The number of an image's group.

        Two models' features have nothing in common; None is like no other image.
        """
        numbers = self._numbers.setdefault(model, [])
        unit = None if features is None else features / (np.linalg.norm(features) + 1e-12)
        if unit is not None and numbers:
            likeness = self._leaders[model][: len(numbers)] @ unit
            if likeness[best := int(likeness.argmax())] >= SIMILAR:
                return numbers[best]
        self._count += 1
        if unit is not None:
            self._append(model, unit)
            numbers.append(self._count)
        return self._count

    def _append(self, model: str, unit: Floats) -> None:
        count = len(self._numbers[model])
        leaders = self._leaders.get(model)
        if leaders is None or count == len(leaders):  # room for twice as many
            grown = np.zeros((max(16, 2 * count), len(unit)), np.float32)
            if leaders is not None:
                grown[:count] = leaders
            self._leaders[model] = leaders = grown
        leaders[count] = unit


def instructiveness(uncertainty: Floats, novelty: Floats) -> Floats:
    """[n] of images: the sum of their ranks by either, each from 0 to 1."""
    return _ranks(uncertainty) + _ranks(novelty)


def order(scores: Floats, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of images, the most instructive first: of each group one,
    then of each a second one, and so on.
    """
    best_first = np.argsort(-scores, kind="stable")
    seen = Counter[int]()
    turns = np.empty(len(scores), np.int64)
    for position, group in zip(best_first.tolist(), groups[best_first].tolist(), strict=True):
        turns[position] = seen[group]
        seen[group] += 1
    return np.asarray(best_first[np.argsort(turns[best_first], kind="stable")])


def _ranks(values: Floats) -> Floats:
    """[n], equal for equal values, from 0 to 1."""
    distinct, places = np.unique(values, return_inverse=True)
    return np.asarray(places / max(1, len(distinct) - 1), np.float32)
