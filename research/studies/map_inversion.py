"""Inversion of more than a node sends: of whole maps, and of items whose places are known.

As `edge_node.extensions.audit.patch_inversion`, which inverts items as they are sent.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from edge_node.extensions.audit.fitted_network import fitted
from edge_node.extensions.audit.patch_inversion import Invert, Plant, begin, scale
from trainer.privacy.patch_protection import ChannelStatistics, Floats, Protection, protect


class Deconvolution(nn.Module):
    """Maps [n, C, H, W] -> images [n, 3, S, S], `factor` = S / H: a linear way,
    and one with hidden layers.
    """

    def __init__(self, channels: int, factor: int, kernel: int = 3, width: int = 64):
        super().__init__()
        outputs = 3 * factor**2
        self.linear = nn.Conv2d(channels, outputs, kernel, padding="same")
        self.hidden = nn.Sequential(
            nn.Conv2d(channels, width, kernel, padding="same"),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel, padding="same"),
            nn.ReLU(),
            nn.Conv2d(width, outputs, kernel, padding="same"),
        )
        self.spread = nn.PixelShuffle(factor)

    def forward(self, maps: Tensor) -> Tensor:
        """Colours, in deviations from the attacker's mean."""
        return cast(Tensor, self.spread(self.linear(maps) + self.hidden(maps)))


def of_maps(plant: Plant, epochs: int, seed: int) -> Invert:
    """The worst case, which nobody sends: from whole maps to images. Learnt on a plant's own."""
    random = begin(seed, "maps")
    seen, target = scale(plant.maps, plant.measure), torch.from_numpy(plant.images)
    network = fitted(
        Deconvolution(plant.cells.shape[1], _factor(plant)),
        lambda: (seen, target),
        epochs,
        random,
        8,
    )
    return lambda maps: network.guess(scale(maps, plant.measure))


def of_places(plant: Plant, protection: Protection, count: int, epochs: int, seed: int) -> Invert:
    """From maps that `scatter` made of `count` items of an image whose places are known;
    learnt on a plant's own.
    """
    random = begin(seed, "places")
    target = torch.from_numpy(plant.images)
    network = Deconvolution(2 * plant.cells.shape[1], _factor(plant), kernel=5)

    def draw() -> tuple[Tensor, Tensor]:
        return scatter(plant, protection, count, random, plant.measure), target

    return fitted(network, draw, epochs, random, 8).guess


def scatter(
    plant: Plant,
    protection: Protection,
    count: int,
    random: np.random.Generator,
    measure: ChannelStatistics,
) -> Tensor:
    """Items of each image, `count` of them, put where they were cut: [n, 2C, H, W],
    in deviations, and where known.

    What somebody sees who draws a node's random numbers as it does: they tell images and places of
    every patch.
    """
    n, channels, grid = plant.cells.shape[:3]
    known = np.zeros((n, channels, grid, 1, 1), np.float32)
    values = np.zeros_like(plant.cells)
    mean, deviation = (each[:, None, None, None] for each in measure)
    for _ in range(count):
        places = random.integers(grid, size=(n, channels))
        rows, columns = np.arange(n)[:, None], np.arange(channels)
        sent = protect(
            plant.cells[rows, columns, places][:, None], plant.measure, protection, random
        )
        values[rows, columns, places], known[rows, columns, places] = sent, 1
    scaled = known * ((values - mean) / deviation)
    return plant._replace(
        cells=np.concatenate([scaled, np.broadcast_to(known, values.shape)], 1)
    ).maps


def psnr(guess: Floats, truth: Floats) -> float:
    """Peak signal-to-noise ratio of images from 0 to 1, in dB; the mean over images."""
    return float((-10 * np.log10(np.square(guess - truth).mean((1, 2, 3)).clip(1e-10))).mean())


def _factor(plant: Plant) -> int:
    return int(plant.images.shape[2] // plant.maps.shape[2])
