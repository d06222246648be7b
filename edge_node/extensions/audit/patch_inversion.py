"""Inversion of feature maps: images that an honest but curious node reconstructs from others'
patches.

It knows the received model, so it makes maps of its own images, and trains a network that inverts
them (Dosovitskiy and Brox 2016). What it sees of others goes through that network. It also knows
how patches are cut and protected, and treats its own in the same way.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_node.extensions.audit.fitted_network import fitted, perceptron
from trainer.privacy.patch_protection import (
    ChannelStatistics,
    Floats,
    Protection,
    draw_mixtures,
    measure_channels,
    protect,
)
from trainer.seeding import generator, key_to_seed

Whole = NDArray[np.int64]
Invert = Callable[[Tensor], Floats]
"""What is seen [n, ...] -> images [n, 3, s, s], 0 to 1."""


class Plant(NamedTuple):
    """Images, and their maps under the received model."""

    images: Floats  # [n, 3, S, S], 0 to 1
    labels: Whole  # [n]
    cells: Floats  # [n, C, P, m, m]: the maps, cut into the P patches of the grid

    @property
    def maps(self) -> Tensor:
        """[n, C, H, W]."""
        n, channels, places, side, _ = self.cells.shape
        across = round(places**0.5)
        cells = self.cells.reshape(n, channels, across, across, side, side).transpose(
            0, 1, 2, 4, 3, 5
        )
        return torch.from_numpy(cells.reshape(n, channels, across * side, across * side))

    @property
    def measure(self) -> ChannelStatistics:
        """Each channel's mean and deviation."""
        return measure_channels(self.cells.reshape(*self.cells.shape[:2], -1, 1))

    def take(self, index: Whole) -> "Plant":
        """Some of the images."""
        return Plant(self.images[index], self.labels[index], self.cells[index])

    def join(self, other: "Plant") -> "Plant":
        """These images and then the other's."""
        return Plant(
            np.concatenate([self.images, other.images]),
            np.concatenate([self.labels, other.labels]),
            np.concatenate([self.cells, other.cells]),
        )


class Items(NamedTuple):
    """What leaves a node, and what of it is secret."""

    patches: Floats  # [n, C, m, m]
    images: Whole  # [n, mix]: positions of the images that each is made of
    places: Whole  # [n, C]: position on the grid, in the first of these images


def plant(images: Floats, labels: Whole, maps: Floats, mask: int) -> Plant:
    """Images [n, 3, S, S] with their maps [n, C, H, W],
    whose sides are multiples of the patches' side.
    """
    n, channels, height, width = maps.shape
    rows = maps.reshape(n, channels, height // mask, mask, width // mask, mask).transpose(
        0, 1, 2, 4, 3, 5
    )
    return Plant(images, labels, np.ascontiguousarray(rows.reshape(n, channels, -1, mask, mask)))


def items(
    plant: Plant,
    quota: int,
    protection: Protection,
    random: np.random.Generator,
    *,
    together: bool = False,
) -> Items:
    """What a plant sends in a round: in each channel a place of its own or, `together`,
    the same place in all.
    """
    return cut(
        plant,
        draw_mixtures(plant.labels, quota, protection.mix, random),
        protection,
        random,
        together=together,
    )


def cut(
    plant: Plant,
    images: Whole,
    protection: Protection,
    random: np.random.Generator,
    *,
    together: bool = False,
) -> Items:
    """Items of these images [n, mix]."""
    channels, grid = plant.cells.shape[1:3]
    depth = 1 if together else channels
    places = random.integers(grid, size=(*images.shape, depth))
    places = np.broadcast_to(places, (*images.shape, channels))
    patches = plant.cells[images[:, :, None], np.arange(channels), places]
    return Items(protect(patches, plant.measure, protection, random), images, places[:, 0])


def pixels(plant: Plant, sent: Items) -> Floats:
    """The part of its first image that lies under each item's first channel, [n, 3, s, s]:
    S / H pixels a cell.
    """
    across = round(plant.cells.shape[2] ** 0.5)
    side = plant.images.shape[2] // across
    n = len(plant.images)
    parts = plant.images.reshape(n, 3, across, side, across, side).transpose(0, 2, 4, 1, 3, 5)
    return parts.reshape(n, across**2, 3, side, side)[sent.images[:, 0], sent.places[:, 0]]


def of_items(
    plant: Plant, protection: Protection, epochs: int, seed: int, *, together: bool = False
) -> Invert:
    """From items, one at a time, to what lies under the first channel's place;
    learnt on a plant's own items.

    `together` is for items whose channels all come from one place.
    """
    random = begin(seed, "items")

    def draw() -> tuple[Tensor, Tensor]:
        sent = items(plant, 4 * len(plant.images), protection, random, together=together)
        return scale(torch.from_numpy(sent.patches), plant.measure), torch.from_numpy(
            pixels(plant, sent)
        )

    seen, target = draw()
    network = fitted(perceptron(seen[0].numel(), *target.shape[1:]), draw, epochs, random, 64)
    return lambda patches: network.guess(scale(patches, plant.measure))


def begin(seed: int, what: str) -> np.random.Generator:
    """The random numbers of a network that is trained for `what`, torch's among them."""
    torch.manual_seed(key_to_seed(seed, "inversion", what))
    return generator(seed, "inversion", what)


def scale(patches: Tensor, measure: ChannelStatistics) -> Tensor:
    """In deviations of each channel; channels come third from the end."""
    mean, deviation = (torch.from_numpy(each)[:, None, None] for each in measure)
    return (patches - mean) / deviation.clamp_min(1e-6)
