"""Sums of a plant's image features on fixed integer grids, exact in any order of plants.

An image counts once: each of its views, whose feature vectors have at most length one, counts as
the same part of it. Totals are read as they are, not as means.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from broker_config.protocol.messages import TensorSpec
from trainer.models.named_tensors import Arrays
from trainer.seeding import generator

PREFIX = "statistics"
MAX_IMAGES = 4096  # of a plant: with this, 100,000 plants fit into 63 bits
VIEWS = 8  # of an image; a power of two, so that an eighth of a whole number lies on a grid, too
FEATURE_BITS = 15  # grid of a view's features
SUM_BITS = FEATURE_BITS + 3  # grid of an image's features, the mean of its views'
_PRODUCT_BITS = 2 * FEATURE_BITS + 3  # grid of means of products
_QUARTIC_BITS = 24  # grid of fourth powers: up to 16 each, twice with the correction for the mean
_NEGATIVE = 1e-9  # of the trace: eigenvalues below minus this, and the grid's, are no rounding


class Sums(NamedTuple):
    """Sums over some plants' images, of C classes in d dimensions.

    z is an image's feature vector, the mean of its views'; m_kc the mean of a plant's images of a
    class. A class is `single` at a plant that has one image of it: this says nothing of how images
    scatter about the plant's mean. The product of its mean is in `scatter` all the same, so that no
    image is lost where plants have hardly any.
    """

    images: np.ndarray  # [C] N_c
    squares: np.ndarray  # [C] sum over plants of n_kc^2
    holders: np.ndarray  # [C] plants that have the class
    singles: np.ndarray  # [C] plants that have one image of it
    sums: np.ndarray  # [C, d] S_c
    single_sums: np.ndarray  # [C, d] those of singles
    # [d (d + 1) / 2] W of views, and singles' z z^T: upper triangle, row by row
    scatter: np.ndarray
    trace: np.ndarray  # [1] sum of |z - m_kc|^2
    between: np.ndarray  # [1] A: sum of n_kc |m_kc|^2
    # [1] Q: sum of n / (n - 1) |mean over views of (view - m_kc) (view - m_kc)^T|_F^2, n > 1
    quartic: np.ndarray

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

    def combine(
        self, other: "Sums", operation: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> "Sums":
        """Each sum with the other's: np.add joins plants,
        np.subtract takes them out again, exactly.
        """
        return Sums(*(operation(mine, theirs) for mine, theirs in zip(self, other, strict=True)))

    def without(self, other: "Sums") -> "Sums":
        """The sums without those of some of the plants."""
        return self.combine(other, np.subtract)

    def values(self) -> "Sums":
        """The same as float64, with the scatter as a symmetric matrix [d, d]."""
        scaled = self._scaled()
        scatter = _lower(scaled.scatter, self.dimensions)
        scatter += np.tril(scatter, -1).T
        return scaled._replace(scatter=scatter)

    def _scaled(self) -> "Sums":
        return Sums(*(value * 2.0 ** -_BITS[name] for name, value in self._asdict().items()))


_BITS = dict.fromkeys(Sums._fields, 0) | {
    "sums": SUM_BITS,
    "single_sums": SUM_BITS,
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


def no_images(classes: int, dimensions: int) -> Sums:
    """The sums over no image."""
    return Sums.of(
        {name: np.zeros(shape, np.int64) for name, shape in shapes(classes, dimensions).items()}
    )


def specs(classes: int, dimensions: int) -> dict[str, TensorSpec]:
    """Shape and grid of each named sum, for a federation's spec."""
    return {
        name: TensorSpec(shape, _BITS[name.removeprefix(f"{PREFIX}.")], dtype="int64")
        for name, shape in shapes(classes, dimensions).items()
    }


def directions(features: int, dimensions: int) -> np.ndarray:
    """The public directions [dimensions, features], orthonormal,
    on which features are projected; the same for all.
    """
    drawn = generator(0, "directions", features, dimensions).standard_normal((features, dimensions))
    return np.ascontiguousarray(np.linalg.qr(drawn)[0].T)


def quantise(features: np.ndarray) -> np.ndarray:
    """Features rounded to their grid, float64."""
    return np.asarray(_steps(features) / 2.0**FEATURE_BITS)


def _steps(features: np.ndarray) -> np.ndarray:
    """Features as whole numbers of steps of their grid, float64: BLAS takes these."""
    return np.asarray(np.rint(np.asarray(features, np.float64) * 2.0**FEATURE_BITS))


def _longest(dimensions: int) -> float:
    """Length that a vector of length one can have on the grid, and a little more."""
    return 1 + float(np.sqrt(dimensions)) * 2.0**-FEATURE_BITS


def choose_images(labels: np.ndarray, most: int = MAX_IMAGES) -> np.ndarray:
    """Positions of the images that count: all, or of more than `most` the first of each class,
    evenly.
    """
    turns = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        turns[labels == label] = np.arange(np.count_nonzero(labels == label))
    return np.sort(np.argsort(turns, kind="stable")[:most])


def collect(features: np.ndarray, labels: np.ndarray, classes: int) -> Sums:
    """One plant's sums.

    All sums over views, images and dimensions are of whole numbers below 2^53: no order, number of
    threads or processor changes a bit of them.

    Args:
        features: [n, VIEWS, d], each vector of at most length one; n <= MAX_IMAGES.
        labels: [n], in 0..classes - 1.
        classes: of the federation.

    Raises:
        ValueError: too many images, or features longer than one.
    """
    if len(labels) > MAX_IMAGES:
        raise ValueError(f"{len(labels)} images are more than the {MAX_IMAGES} of a plant")
    dimensions = features.shape[2]
    images = np.bincount(labels, minlength=classes).astype(np.int64)
    sums = np.zeros((classes, dimensions), np.int64)
    scatter = np.zeros((dimensions, dimensions))
    trace = 0.0
    quartic = 0
    for label in np.flatnonzero(images):
        views = _steps(features[labels == label])
        count = int(images[label])
        if not np.linalg.norm(views, axis=2).max() <= _longest(dimensions) * 2.0**FEATURE_BITS:
            raise ValueError("a feature vector is longer than one")
        each = views.sum(1).astype(np.int64)
        total = each.sum(0)
        flat = views.reshape(-1, dimensions)
        sums[label] = total
        scatter += flat.T @ flat
        if count > 1:
            wide = total.astype(np.float64)
            length = float(total @ total)
            scatter -= np.outer(wide, wide) / (VIEWS * count)
            trace += (float(np.square(each).sum()) - length / count) / VIEWS
            along = (views @ wide / (VIEWS * count))[:, :, None]
            centred = (
                views @ views.transpose(0, 2, 1)
                - along
                - along.transpose(0, 2, 1)
                + length / (VIEWS * count) ** 2
            )
            squares = (
                np.square(centred * 2.0 ** (-2 * FEATURE_BITS)).mean((1, 2)) * count / (count - 1)
            )
            quartic += int(np.rint(squares * 2.0**_QUARTIC_BITS).sum())
    single = images == 1
    return Sums(
        images=images,
        squares=np.square(images),
        holders=(images > 0).astype(np.int64),
        singles=single.astype(np.int64),
        sums=sums,
        single_sums=np.where(single[:, None], sums, 0),
        scatter=np.rint(scatter[_upper(dimensions)]).astype(np.int64),
        trace=np.array([round(trace)]),
        between=_between(images, sums),
        quartic=np.array([quartic]),
    )


def _between(images: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """A plant's A [1] as it travels, from its counts and sums."""
    each = np.square(sums).sum(1) / (VIEWS * np.maximum(images, 1))
    return np.array([round(float(each.sum()))])


def _upper(dimensions: int) -> np.ndarray:
    """Which entries of a matrix [d, d] travel; bool."""
    return np.tri(dimensions, dtype=bool).T


def _lower(triangle: np.ndarray, dimensions: int) -> np.ndarray:
    """The lower triangle of a scatter [d, d], zeros above it."""
    matrix = np.zeros((dimensions, dimensions))
    matrix[_upper(dimensions)] = triangle
    return matrix.T


def check(arrays: Mapping[str, np.ndarray]) -> None:
    """Check that one plant's sums, of the right shapes, are such as images can have.

    What follows from other sums must agree with them; what an image can add is bounded; neither the
    scatter nor what is left of it without its single images has a negative direction, so no total
    has one. That keeps totals from overflowing and heads finite; a liar that stays within it can
    still spoil others' heads with a few images, since sums that images could have need not be those
    of a plant's images.

    Raises:
        ValueError: they are not.
    """
    given = Sums.of(arrays)
    images = given.images
    _check_images(images, MAX_IMAGES)
    derived = (np.square(images), images > 0, images == 1)
    if any(not np.array_equal(*pair) for pair in zip(derived, given[1:4], strict=True)):
        raise ValueError("its statistics contradict their own numbers of images")
    sums = given._scaled()
    longest = _longest(given.dimensions)
    lengths = np.linalg.norm(sums.sums, axis=1)
    if (lengths > images * longest).any():
        raise ValueError("its statistics hold a mean longer than any feature vector")
    single = images == 1
    if not np.array_equal(given.single_sums, np.where(single[:, None], given.sums, 0)):
        raise ValueError(
            "its statistics of single images are not those of its classes with one image"
        )
    if not np.array_equal(given.between, _between(images, given.sums)):
        raise ValueError("its statistics contradict their own means")
    # for views about their class's mean
    room = images * longest**2 - np.square(lengths) / np.maximum(images, 1)
    _check_spread(sums, float(room.sum()), float(room[~single].sum()), plants=1)


def check_totals(others: Sums, nodes: int) -> None:
    """Check that totals, without one plant's own,
    are such as the sums of at most so many plants can have.

    They are as they travel. A difference that has wrapped around is beyond every bound: those of
    100,000 plants are below 2^62.

    Raises:
        ValueError: they are not.
    """
    images, squares, holders, singles = others[:4]
    _check_images(images, nodes * MAX_IMAGES)
    ascending = (
        [0, singles, holders, np.minimum(images, nodes)],
        [images, squares, images * np.minimum(images, MAX_IMAGES)],
    )
    neighbours = itertools.chain.from_iterable(itertools.pairwise(row) for row in ascending)
    is_ascending = all((low <= high).all() for low, high in neighbours)
    if not is_ascending or (images > holders * MAX_IMAGES).any():
        raise ValueError("its statistics contradict their own numbers of images")
    sums = others._scaled()
    longest = _longest(others.dimensions)
    lengths = np.linalg.norm(sums.sums, axis=1)
    if (lengths > images * longest).any() or (
        np.linalg.norm(sums.single_sums, axis=1) > singles * longest
    ).any():
        raise ValueError("its statistics hold a mean longer than any feature vector")
    widest = float(images.sum()) * longest**2
    least = float((np.square(lengths) / np.maximum(images, 1)).sum())
    rounding = nodes * 2.0**-_PRODUCT_BITS
    if not least * (1 - _NEGATIVE) - rounding <= sums.between[0] <= widest + rounding:
        raise ValueError("its statistics contradict their own means")
    _check_spread(sums, widest, widest, plants=nodes)


def _check_images(images: np.ndarray, most: int) -> None:
    if images.min() < 0 or images.max() > most or images.sum() > most:  # the sum alone may overflow
        raise ValueError(
            f"its statistics count {images.min()} to {images.max()} images; 0 to {most} are "
            "possible"
        )


def _check_spread(sums: Sums, room: float, widest: float, plants: int) -> None:
    """Check trace, fourth moment and scatter of so many plants' sums, float64.

    Args:
        sums: as their grids say, the scatter as its upper triangle.
        room: the widest that views can be spread about their classes' means; `widest`, those of no
            single image.
        plants: each rounds its sums once.
    """
    rounding = plants * (sums.dimensions + 1) * 2.0**-_PRODUCT_BITS
    scatter = _lower(sums.scatter, sums.dimensions)
    single = sums.singles > 0
    if single.any():
        means = sums.single_sums[single] / np.sqrt(sums.singles[single])[:, None]
        scatter -= (means.T @ means).T  # it is its own transpose, whose rows lie as scatter's do
    widest += rounding
    spread = float(np.trace(scatter))
    if not (0 <= sums.trace[0] <= min(spread + rounding, widest) and spread <= room + rounding):
        raise ValueError("its statistics are spread more widely than features can be")
    most = 8 * _longest(sums.dimensions) ** 2 * widest + sums.images.sum() * 2.0**-_QUARTIC_BITS
    if not 0 <= sums.quartic[0] <= most:
        raise ValueError("its statistics hold an impossible fourth moment")
    if not _is_positive_semidefinite(scatter, rounding):
        raise ValueError("its statistics hold a scatter with a negative direction")


def _is_positive_semidefinite(matrix: np.ndarray, rounding: float) -> bool:
    """Whether a Cholesky decomposition of a matrix, of which the lower triangle counts,
    exists but for rounding.
    """
    raised = matrix.copy("K")
    raised[np.diag_indices(len(matrix))] += _NEGATIVE * max(float(np.trace(matrix)), 0.0) + rounding
    try:
        np.linalg.cholesky(raised)
    except np.linalg.LinAlgError:
        return False
    return True
