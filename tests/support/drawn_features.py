"""Features of plants' images, drawn: unit vectors about class means,
with correlated noise and slightly other views.
"""

from typing import NamedTuple

import numpy as np

from trainer.seeding import generator
from trainer.statistics.sums import VIEWS, Sums, collect


class Plant(NamedTuple):
    """A plant's images."""

    features: np.ndarray  # [n, VIEWS, d]
    labels: np.ndarray  # [n]

    def sums(self, classes: int) -> Sums:
        return collect(self.features, self.labels, classes)

    def without(self, images: int | list[int]) -> "Plant":
        return Plant(np.delete(self.features, images, 0), np.delete(self.labels, images))


def draw_plant(seed: int, counts: list[int], dimensions: int, *, number: int = 0) -> Plant:
    """Plant `number` with counts[c] images of class c;
    all plants of a seed have the same classes.
    """
    shared, own = generator(seed, "classes", dimensions), generator(seed, "plant", number, *counts)
    means = shared.standard_normal((len(counts), dimensions))
    mixing = shared.standard_normal((dimensions, dimensions)) / np.sqrt(dimensions)
    labels = np.repeat(np.arange(len(counts)), counts)
    images = means[labels] + own.standard_normal((len(labels), dimensions)) @ mixing
    views = images[:, None] + 0.3 * own.standard_normal((len(labels), VIEWS, dimensions))
    return Plant(views / np.linalg.norm(views, axis=2, keepdims=True), labels)


def draw_plants(seed: int, counts: list[list[int]], dimensions: int) -> list[Plant]:
    """One plant for each row of counts."""
    return [draw_plant(seed, row, dimensions, number=number) for number, row in enumerate(counts)]


def total_of(plants: list[Plant], classes: int) -> Sums:
    """Their totals."""
    first, *rest = [plant.sums(classes) for plant in plants]
    for each in rest:
        first = first.combine(each, np.add)
    return first
