"""Sums of a plant's image features on fixed integer grids, exact in any order of plants.

An image counts once: each of its views, whose feature vectors have at most length one, counts as the same part of it.
Totals are read as they are, not as means.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from broker_config.protocol.messages import TensorSpec
from trainer.models.named_tensors import Arrays
from trainer.training.seeding import generator

PREFIX = "statistics"
MAX_IMAGES = 4096  # of a plant: with this, 100,000 plants fit into 63 bits
VIEWS = 8  # of an image; a power of two, so that an eighth of a whole number lies on a grid, too
_FEATURE_BITS = 15  # grid of a view's features
_SUM_BITS = _FEATURE_BITS + 3  # grid of an image's features, the mean of its views'
_PRODUCT_BITS = 2 * _FEATURE_BITS + 3  # grid of means of products
_QUARTIC_BITS = 24  # grid of fourth powers: up to 16 each, twice with the correction for the mean
_ROUNDING = 2.0**-6  # of derived sums, against what they follow from
_NEGATIVE = 1e-6  # of the trace: eigenvalues below minus this are no rounding


class Sums(NamedTuple):
    """Sums over some plants' images, of C classes in d dimensions.

    z is an image's feature vector, the mean of its views'; m_kc the mean of a plant's images of a class. A class is
    `single` at a plant that has one image of it: this says nothing of how images scatter about the plant's mean. The
    product of its mean is in `scatter` all the same, so that no image is lost where plants have hardly any.
    """

    images: np.ndarray  # [C] N_c
    squares: np.ndarray  # [C] sum over plants of n_kc^2
    holders: np.ndarray  # [C] plants that have the class
    singles: np.ndarray  # [C] plants that have one image of it
    sums: np.ndarray  # [C, d] S_c
    single_sums: np.ndarray  # [C, d] those of singles
    scatter: np.ndarray  # [d (d + 1) / 2] W of views, and singles' z z^T: upper triangle, row by row
    trace: np.ndarray  # [1] sum of |z - m_kc|^2
    between: np.ndarray  # [1] A: sum of n_kc |m_kc|^2
    quartic: (
        np.ndarray
    )  # [1] Q: sum of n / (n - 1) * |mean over views of (view - m_kc) (view - m_kc)^T|_F^2; without singles

    @property
    def dimensions(self) -> int:
        """Length of a feature vector."""
        return int(self.sums.shape[1])

    def arrays(self) -> Arrays:
        """Named as they travel."""
        return {f"{PREFIX}.{name}": value for name, value in self._asdict().items()}

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> "Sums":
        """From named arrays, among which others may be."""
        return Sums(**{name: np.asarray(arrays[f"{PREFIX}.{name}"]) for name in Sums._fields})

    def combine(self, other: "Sums", operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> "Sums":
        """Each sum with the other's: np.add joins plants, np.subtract takes them out again, exactly."""
        return Sums(*(operation(mine, theirs) for mine, theirs in zip(self, other, strict=True)))

    def without(self, other: "Sums") -> "Sums":
        """The sums without those of some of the plants."""
        return self.combine(other, np.subtract)

    def values(self) -> "Sums":
        """The same as float64, with the scatter as a symmetric matrix [d, d]."""
        scaled = Sums(*(value * 2.0 ** -_BITS[name] for name, value in self._asdict().items()))
        return scaled._replace(scatter=_unpack(scaled.scatter, self.dimensions))


_BITS = dict.fromkeys(Sums._fields, 0) | {
    "sums": _SUM_BITS,
    "single_sums": _SUM_BITS,
    "scatter": _PRODUCT_BITS,
    "trace": _PRODUCT_BITS,
    "between": _PRODUCT_BITS,
    "quartic": _QUARTIC_BITS,
}


def shapes(classes: int, dimensions: int) -> dict[str, tuple[int, ...]]:
    """The shape of each named sum."""
    vectors = dict.fromkeys(("sums", "single_sums"), (classes, dimensions))
    scalars = dict.fromkeys(("trace", "between", "quartic"), (1,))
    of = vectors | scalars | {"scatter": (dimensions * (dimensions + 1) // 2,)}
    return {f"{PREFIX}.{name}": of.get(name, (classes,)) for name in Sums._fields}


def specs(classes: int, dimensions: int) -> dict[str, TensorSpec]:
    """Shape and grid of each named sum, for a federation's spec."""
    return {
        name: TensorSpec(shape, _BITS[name.removeprefix(f"{PREFIX}.")], dtype="int64")
        for name, shape in shapes(classes, dimensions).items()
    }


def directions(features: int, dimensions: int) -> np.ndarray:
    """The public directions [dimensions, features], orthonormal, on which features are projected; the same for all."""
    drawn = generator(0, "directions", features, dimensions).standard_normal((features, dimensions))
    return np.ascontiguousarray(np.linalg.qr(drawn)[0].T)


def quantise(features: np.ndarray) -> np.ndarray:
    """Features rounded to their grid, float64."""
    return np.asarray(np.rint(np.asarray(features, np.float64) * 2.0**_FEATURE_BITS) / 2.0**_FEATURE_BITS)


def collect(features: np.ndarray, labels: np.ndarray, classes: int) -> Sums:
    """One plant's sums.

    Sums over images are of numbers on a grid and below 2^53 steps of it: no order and no number of threads changes a
    bit of them.

    Args:
        features: [n, VIEWS, d], each vector of at most length one; n <= MAX_IMAGES.
        labels: [n], in 0..classes - 1.
        classes: of the federation.

    Raises:
        ValueError: too many images, or features longer than one.
    """
    if len(labels) > MAX_IMAGES:
        raise ValueError(f"{len(labels)} images are more than the {MAX_IMAGES} of a plant")
    views = quantise(features)
    dimensions = views.shape[2]
    if len(views) and not np.linalg.norm(views, axis=2).max() <= 1 + dimensions * 2.0**-_FEATURE_BITS:
        raise ValueError("a feature vector is longer than one")
    images = np.bincount(labels, minlength=classes).astype(np.int64)
    sums = np.zeros((classes, dimensions))
    scatter = np.zeros((dimensions, dimensions))
    trace = between = quartic = 0.0
    for label in np.flatnonzero(images):
        own, count = views[labels == label], int(images[label])
        sums[label] = own.mean(1).sum(0)
        mean = sums[label] / count
        between += count * float(mean @ mean)
        flat = own.reshape(-1, dimensions)
        scatter += flat.T @ flat / VIEWS
        if count > 1:
            scatter -= count * np.outer(mean, mean)
            trace += float(np.square(own.mean(1) - mean).sum())
            centred = own - mean
            quartic += count / (count - 1) * float(np.square(centred @ centred.transpose(0, 2, 1)).mean((1, 2)).sum())
    single = images == 1
    exact = {
        "images": images,
        "squares": np.square(images),
        "holders": images > 0,
        "singles": single,
        "sums": sums,
        "single_sums": np.where(single[:, None], sums, 0),
        "scatter": scatter[np.triu_indices(dimensions)],
        "trace": trace,
        "between": between,
        "quartic": quartic,
    }
    return Sums(
        **{name: np.rint(np.atleast_1d(value) * 2.0 ** _BITS[name]).astype(np.int64) for name, value in exact.items()}
    )


def _unpack(triangle: np.ndarray, dimensions: int) -> np.ndarray:
    matrix = np.zeros((dimensions, dimensions))
    matrix[np.triu_indices(dimensions)] = triangle
    return np.asarray(matrix + np.triu(matrix, 1).T)


def check(arrays: Mapping[str, np.ndarray], most: int = MAX_IMAGES) -> None:
    """Check that one plant's sums, of the right shapes, are such as images can have.

    What follows from other sums must agree with them; what an image can add is bounded; a scatter has no negative
    direction. A liar is left with the influence of `most` images.

    Raises:
        ValueError: they are not.
    """
    given = Sums.of(arrays)
    images = given.images
    if images.min() < 0 or images.sum() > most:
        raise ValueError(f"its statistics count {images.min()} to {images.sum()} images; 0 to {most} are possible")
    derived = (np.square(images), (images > 0).astype(np.int64), (images == 1).astype(np.int64))
    if any(not np.array_equal(*pair) for pair in zip(derived, given[1:4], strict=True)):
        raise ValueError("its statistics contradict their own numbers of images")
    sums = given.values()
    lengths = np.linalg.norm(sums.sums, axis=1)
    if (lengths > images * (1 + given.dimensions * 2.0**-_FEATURE_BITS)).any():
        raise ValueError("its statistics hold a mean longer than any feature vector")
    if not np.array_equal(given.single_sums, np.where((images == 1)[:, None], given.sums, 0)):
        raise ValueError("its statistics of single images are not those of its classes with one image")
    total, between = float(images.sum()), float((np.square(lengths) / np.maximum(images, 1)).sum())
    single = float(np.square(lengths[images == 1]).sum())
    room = _ROUNDING * max(total, 1.0)
    spread = float(np.trace(sums.scatter)) - single  # of views about their classes' means
    if abs(between - float(sums.between[0])) > room:
        raise ValueError("its statistics contradict their own means")
    if not (-room <= float(sums.trace[0]) <= spread + room <= total - between + 2 * room):
        raise ValueError("its statistics are spread more widely than features can be")
    if not 0 <= float(sums.quartic[0]) <= 32 * total:
        raise ValueError("its statistics hold an impossible fourth moment")
    if not _is_positive_semidefinite(sums.scatter):
        raise ValueError("its statistics hold a scatter with a negative direction")


def _is_positive_semidefinite(matrix: np.ndarray) -> bool:
    """Whether a Cholesky decomposition exists, but for rounding."""
    trace = float(np.trace(matrix))
    if trace <= 0:
        return not matrix.any()
    try:
        np.linalg.cholesky(matrix + _NEGATIVE * trace * np.eye(len(matrix)))
    except np.linalg.LinAlgError:
        return False
    return True
