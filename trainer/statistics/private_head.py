"""The classifier made of private sums: the others' class means as noisy as they are,
one's own as they are.

A plant's own images need no protection from itself: how features vary within a class, and its own
classes' means, are those of its images. Of the others it has means whose noise is known. Each mean
is the posterior one: what is known of it, by its precision, drawn towards the mean of all classes
by as much as noise there is.
"""

import numpy as np

from trainer.statistics.lda_head import Head, Means, Spread, estimate_spread, linear
from trainer.statistics.private_sums import RADIUS, PrivateSums
from trainer.statistics.sums import Sums

# traces of covariances within and between classes, where none is known
_WITHIN = RADIUS**2 / 2
_BETWEEN = RADIUS**2 / 3
_LEAST = 1e-3  # part of RADIUS^2 that classes differ by, at least


def fit(others: PrivateSums, own: Sums, noise: float, directions: int) -> Head:
    """The head of a plant, for features cut and measured in the public frame.

    Args:
        others: totals of the other plants, as `PrivateSums.values` gives them.
        own: of this plant, exact, as `Sums.values` gives them; all zero if it has no images.
        noise: the standard deviation of each plant's, in lengths of RADIUS.
        directions: along which features lie.
    """
    plants = float(others.plants[0])
    spread = (
        estimate_spread(own)
        if own.images.sum() > own.holders.sum()
        else _unknown_spread(own.dimensions)
    )
    deviation = noise * np.sqrt(plants)  # of numbers of images, and of sums in lengths of RADIUS
    taught = others.images > max(0.5, deviation)
    images = np.where(taught, np.maximum(others.images, 1), 1)
    theirs = spread.within / images + directions * np.square(RADIUS * deviation / images)
    precision = np.where(taught, 1 / theirs, 0.0), own.images / spread.within
    known = (precision[0] + precision[1]) > 0
    variance = 1 / np.maximum(precision[0] + precision[1], np.finfo(np.float64).tiny)
    means = others.sums / images[:, None], own.sums / np.maximum(own.images, 1)[:, None]
    raw = (
        sum(each[:, None] * mean for each, mean in zip(precision, means, strict=True))
        * variance[:, None]
    )
    weight = np.where(known, 1 / (variance + _BETWEEN), 0.0)
    centre = weight @ raw / max(weight.sum(), np.finfo(np.float64).tiny)
    apart = np.square(raw - centre).sum(1)
    apart_or_zero = float((apart - variance)[known].mean()) if known.any() else 0.0
    between = max(_LEAST * RADIUS**2, apart_or_zero)
    posterior = np.where(known, between * variance / (between + variance), 0.0)
    drawn = centre + (between / (between + variance))[:, None] * (raw - centre)
    doubt = float(posterior[known].mean()) / directions if known.any() else 0.0
    precise = _add_doubt(spread, doubt)
    result = Means(np.where(known[:, None], drawn, 0.0), known, np.zeros(own.dimensions))
    return Head(*linear(result, precise), result, precise)


def _unknown_spread(dimensions: int) -> Spread:
    return Spread(
        np.eye(dimensions) * (dimensions / _WITHIN), _WITHIN, _BETWEEN, float(dimensions), 1.0
    )


def _add_doubt(spread: Spread, variance: float) -> Spread:
    """The spread of images about means that are uncertain by this variance in each direction."""
    if not variance:
        return spread
    covariance = np.linalg.inv(spread.precision)
    covariance[np.diag_indices(len(covariance))] += variance
    return spread._replace(precision=np.linalg.inv(covariance))


def express(head: Head, centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weight [C, d] and bias [C] of the head for features of length one as they are,
    not from the public centre.
    """
    return head.weight, head.bias - head.weight @ centre
