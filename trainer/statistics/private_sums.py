"""Sums of a plant's image features from which no single image can be told:
noise is added before they leave.

Neighbours are two folders of a plant that differ in one image: another one, of whichever class, in
its place. So how many images a plant has is no secret, and of which classes they are is one. What
leaves is, of each class, the sum S_c of its images' feature vectors x, none longer than RADIUS, and
their number n_c, both with Gaussian noise. Let numbers be measured in units of RADIUS. If the image
that is replaced stays in its class, S_c moves by |x - x'| <= 2 RADIUS, and no number does. If it
changes its class, two sums move by at most RADIUS each and two numbers by RADIUS each: together by
the root of 4 RADIUS^2. So all of it, as one vector, moves by SENSITIVITY * RADIUS at most, and
numbers cost nothing beside the sums. Everything else that a head needs is made of these, or of what
everybody knows.

Sums and noise are whole numbers of a grid's steps, and added as such: no rounding of floating-point
numbers depends on an image after its features are rounded (Mironov, CCS 2012, shows what would
otherwise be told).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from broker_config.protocol.messages import TensorSpec
from trainer.models.named_tensors import Arrays
from trainer.statistics.sums import FEATURE_BITS, MAX_IMAGES, PREFIX, SUM_BITS, Sums

DIRECTIONS = 24  # along which features are measured; on tuning images 16 to 32 hardly differ
RADIUS = 0.4  # of features about the public centre; on tuning images 0.3 to 0.5 hardly differ
SENSITIVITY = 2.0  # in lengths of RADIUS: how far one image can move what leaves
_IMAGE_BITS = 18  # grid of numbers of images
_TAILS = 16.0  # standard deviations that noise does not reach

Normal = Callable[[str, int], np.ndarray]
"""(name, count) -> so many normal numbers of the node's own, float64,
drawn for what they are added to.
"""


class PrivateSums(NamedTuple):
    """Sums over some plants, of C classes in d dimensions."""

    plants: np.ndarray  # [1]
    images: np.ndarray  # [C] N_c and noise: may be negative
    sums: np.ndarray  # [C, d] S_c and noise
    centre: np.ndarray  # [d] sum over plants of the public centre

    def arrays(self) -> Arrays:
        """Named as they travel."""
        return {f"{PREFIX}.{name}": value for name, value in self._asdict().items()}

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> "PrivateSums":
        """From named arrays, among which others may be."""
        return PrivateSums(
            **{name: np.asarray(arrays[f"{PREFIX}.{name}"]) for name in PrivateSums._fields}
        )

    def values(self) -> "PrivateSums":
        """The same as float64, the centre as the mean over plants."""
        scaled = PrivateSums(
            *(value * 2.0 ** -_BITS[name] for name, value in self._asdict().items())
        )
        return scaled._replace(centre=scaled.centre / np.maximum(scaled.plants, 1))


_BITS = {"plants": 0, "images": _IMAGE_BITS, "sums": SUM_BITS, "centre": SUM_BITS}


def specs(classes: int, dimensions: int) -> dict[str, TensorSpec]:
    """Shape and grid of each named sum, for a federation's spec."""
    shapes: dict[str, tuple[int, ...]] = {
        "plants": (1,),
        "images": (classes,),
        "sums": (classes, dimensions),
        "centre": (dimensions,),
    }
    return {
        f"{PREFIX}.{name}": TensorSpec(shape, _BITS[name], dtype="int64")
        for name, shape in shapes.items()
    }


def cut(features: np.ndarray) -> np.ndarray:
    """Features [..., d] cut to a length that is at most RADIUS after they are rounded to their
    grid.
    """
    most = RADIUS - np.sqrt(features.shape[-1]) * 2.0 ** -(FEATURE_BITS + 1)
    lengths = np.linalg.norm(features, axis=-1, keepdims=True)
    return np.asarray(features * np.minimum(1, most / np.maximum(lengths, most)))


def release(
    exact: Sums, centre: np.ndarray, directions: np.ndarray, noise: float, normal: Normal
) -> PrivateSums:
    """What leaves a plant.

    Args:
        exact: of features that `cut` gave, as they travel.
        centre: [d], public.
        directions: [k, d], public and orthonormal: features lie along these, and noise beside them
            is taken off again.
        noise: its standard deviation, in lengths of RADIUS.
        normal: the plant's own.
    """
    classes, dimensions = exact.sums.shape
    drawn = {
        name: noise * normal(name, count)
        for name, count in (("images", classes), ("sums", classes * dimensions))
    }
    images = (exact.images << _IMAGE_BITS) + _steps(drawn["images"], _IMAGE_BITS)
    sums = exact.sums + _steps(RADIUS * drawn["sums"], SUM_BITS).reshape(classes, dimensions)
    along = sums.astype(np.float64) @ directions.T @ directions
    return PrivateSums(
        np.ones(1, np.int64), images, np.rint(along).astype(np.int64), _steps(centre, SUM_BITS)
    )


def _steps(values: np.ndarray, bits: int) -> np.ndarray:
    return np.rint(values * 2.0**bits).astype(np.int64)


def check(sums: PrivateSums, noise: float) -> None:
    """Check that one plant's sums, of the right shapes, are such as images and noise can have.

    Raises:
        ValueError: they are not.
    """
    if sums.plants[0] != 1:
        raise ValueError(f"its statistics are those of {sums.plants[0]} plants, not of one")
    check_totals(sums, 1, noise)


def check_totals(totals: PrivateSums, nodes: int, noise: float) -> None:
    """Check that totals are such as the sums of at most so many plants can have.

    Raises:
        ValueError: they are not.
    """
    plants = int(totals.plants[0])
    if not 0 <= plants <= nodes:
        raise ValueError(f"its statistics are those of {plants} plants; 0 to {nodes} are possible")
    values = totals.values()
    most = plants * MAX_IMAGES
    images, sums, centre = (float(np.abs(each).max(initial=0)) for each in values[1:])
    if images > most + _TAILS * noise * plants:
        raise ValueError(f"its statistics count {images:.0f} images; {most} and noise are possible")
    if sums > RADIUS * (most + _TAILS * noise * plants):
        raise ValueError("its statistics hold a sum longer than that of any feature vectors")
    if centre > 1:
        raise ValueError("its statistics hold a centre longer than any feature vector")
