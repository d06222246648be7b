"""Measures of what an attack tells: of counts, of membership, of pictures;
each 1 for everything.
"""

from itertools import product
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Floats = NDArray[np.float32]
_NORMAL_95 = 1.96
SIDE = 32  # pixels to which pictures are shrunk before they are compared


def auc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: how often a positive scores higher than a negative
    (0.5 for nothing).
    """
    below = np.sort(scores[~positive])
    ranks = (
        np.searchsorted(below, scores[positive], "left")
        + np.searchsorted(below, scores[positive], "right")
    ) / 2
    return float(ranks.mean() / len(below))


def auc_interval(area: float, positives: int, negatives: int) -> tuple[float, float]:
    """About 95 % of such areas (Hanley and McNeil 1982, eq. 1), cut to 0..1."""
    one = area / (2 - area)
    other = 2 * area**2 / (1 + area)
    variance = (
        area * (1 - area) + (positives - 1) * (one - area**2) + (negatives - 1) * (other - area**2)
    )
    half = _NORMAL_95 * sqrt(max(variance, 0.0) / (positives * negatives))
    return max(0.0, area - half), min(1.0, area + half)


def overlap(guess: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    """How far two distributions over classes agree: 1 minus their total variation distance."""
    return float(1 - np.abs(guess - truth).sum() / 2)


def ssim(guess: Floats, truth: Floats, window: int = 7) -> float:
    """Structural similarity (Wang et al.

    2004) of images from 0 to 1: flat windows, unbiased; the mean of all.
    """
    return float(ssim_each(torch.from_numpy(guess), torch.from_numpy(truth), window).mean())


def ssim_each(guess: Tensor, truth: Tensor, window: int = 7) -> Tensor:
    """The same of each image, [n] float64."""
    x = guess.double()
    y = truth.double()

    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, window, 1)

    unbiased = window**2 / (window**2 - 1)
    mean_x = mean(x)
    mean_y = mean(y)
    spread = unbiased * (mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2)
    shared = unbiased * (mean(x * y) - mean_x * mean_y)
    alike = (2 * mean_x * mean_y + 0.01**2) * (2 * shared + 0.03**2)
    found: Tensor = (alike / ((mean_x**2 + mean_y**2 + 0.01**2) * (spread + 0.03**2))).mean(
        (1, 2, 3)
    )
    return found


def shrink(images: Tensor) -> Tensor:
    """Images [n, 3, S, S], as they are compared: SIDE x SIDE."""
    return functional.adaptive_avg_pool2d(images, SIDE)


def nearest(picture: Tensor, images: Tensor) -> tuple[float, int]:
    """The SSIM of a picture [3, SIDE, SIDE] with the image [n, 3, SIDE,
    SIDE] that is most like it, and its position.

    An image counts in all eight symmetries of the square: features hardly tell which way up it was.
    """
    turned = torch.stack(
        [
            torch.rot90(each, turn, (1, 2))
            for each, turn in product((picture, picture.flip(2)), range(4))
        ]
    )
    alike = torch.stack(
        [ssim_each(each.expand(len(images), -1, -1, -1), images) for each in turned]
    ).amax(0)
    return float(alike.max()), int(alike.argmax())
