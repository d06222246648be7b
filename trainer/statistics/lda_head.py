"""The classifier made of sums: linear discriminant analysis whose means and covariance are
empirical Bayes estimates.

Each plant makes its own: what it knows of a class itself is weighed against what all others know,
by how much plants differ. Relatives: Ledoit and Wolf (Journal of Multivariate Analysis 88:365,
2004) for the shrinkage; pFedFDA (NeurIPS 2024) and FedCGS (AAAI 2025) for Gaussian statistics in
federated learning.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edge.bundle.reference import ClassAxes
from trainer.statistics.sums import VIEWS, Sums, quantise

_LEAST_SHRINKAGE = 0.01
_SHRINKAGE = 0.3  # where plants have one image a class: on tuning images 0.1 to 0.6 hardly differ
_NEVER = 10.0  # how far the logit of a class that nobody has lies below all others
# part of tau2 that all classes of a plant share: its camera; on tuning images 0.3 to 0.5 hardly
# differ
_OFFSET = 0.4
# trace of a covariance: images nearer than this are one image, but for the grid's rounding
_LEAST_VARIANCE = 1e-4
# directions in which features are whitened to tell novelty; 16 to 512 hardly differ on tuning
# images
_WHITENED = 64
_SCALES = np.geomspace(1e-3, 10, 200)  # that logits may be multiplied by
_SCALE_DEVIATION = 0.5  # how far, in its logarithm, the best scale lies from the expected one
# Degrees of freedom for each dimension with which logits are twice as large as they should be: what
# fits tuning images of NEU and X-SDD, shared among five plants in 12 ways (8 to 40 degrees), is
# 0.53 in the median with 1280 dimensions (half of them 0.3 to 0.7) and 0.65 with 256 (0.5 to 0.9).
_HALF_CERTAIN = 0.6


class Spread(NamedTuple):
    """How features vary: within a class at a plant, and between plants."""

    precision: np.ndarray  # [d, d] inverse of the covariance of views within a class
    within: float  # s2: trace of the covariance of images within a class at a plant
    between: float  # tau2: trace of the covariance of plants' means of a class
    freedom: float  # nu: degrees of freedom that the covariance rests on
    shrinkage: float  # lambda, in 0..1


def estimate_spread(total: Sums) -> Spread:
    """Covariance within classes, shrunk as Ledoit and Wolf do, and how far plants' means differ.

    Guards: a class that is single at several plants counts by the scatter about those plants'
        common mean; without any
    degree of freedom the covariance is a multiple of the identity; between = 0 where every class
    has one holder, or nothing is known of the spread at a plant.

    Args:
        total: of all plants, as `Sums.values` gives them.
    """
    dimensions = total.dimensions
    images = float(total.images.sum())
    pairs = float(total.holders.sum())
    own_freedom = images - pairs
    single = total.singles > 0
    means = total.single_sums[single] / total.singles[single][:, None]
    covariance = total.scatter - (means * total.singles[single][:, None]).T @ means
    # Without any freedom, the covariance is that of images' views.
    freedom = own_freedom + float((total.singles[single] - 1).sum()) or max(images, 1.0)
    covariance /= freedom  # in place: each matrix is 13 MB of 1280 features
    power = max(float(np.trace(covariance)), _LEAST_VARIANCE)
    squared = float(np.square(covariance).sum())
    excess = squared - power**2 / dimensions
    shrinkage = _SHRINKAGE
    if own_freedom > 0 and excess > 0:
        noise = (float(total.quartic[0]) / own_freedom - squared) / freedom
        shrinkage = float(np.clip(noise / excess, _LEAST_SHRINKAGE, 1))
    covariance *= 1 - shrinkage
    covariance[np.diag_indices(dimensions)] += shrinkage * power / dimensions
    within = float(total.trace[0]) / own_freedom if own_freedom > 0 else power
    between = _between_plants(total, within)
    return Spread(
        np.linalg.inv(covariance), max(within, _LEAST_VARIANCE), between, freedom, shrinkage
    )


def _between_plants(total: Sums, within: float) -> float:
    """tau2, by the method of moments: unbiased but for the clipping at zero."""
    seen = total.images > 0
    images = total.images[seen]
    room = float(images.sum() - (total.squares[seen] / images).sum())
    if room <= 0:
        return 0.0
    explained = float((np.square(total.sums[seen]).sum(1) / images).sum())
    pairs = float(total.holders.sum())
    classes = float(seen.sum())
    return max(0.0, (float(total.between[0]) - explained - (pairs - classes) * within) / room)


class Means(NamedTuple):
    """One plant's means of the classes."""

    means: np.ndarray  # [C, d] h_kc; zero where nobody has the class
    known: np.ndarray  # bool [C]: whether anybody has it
    offset: np.ndarray  # [d] o_k: how this plant's features differ from others'


def estimate_means(others: Sums, own: Sums, spread: Spread) -> Means:
    """One plant's means: its own and the others', each by its precision;
    others' are moved by the plant's offset.

    Args:
        others: of the other plants, as `Sums.values` gives them.
        own: of this plant, likewise.
        spread: of all.
    """
    theirs = others.images
    mine = own.images
    within = spread.within
    common = _OFFSET * spread.between
    both = (theirs > 0) & (mine > 0)
    general = others.sums / np.maximum(theirs, 1)[:, None]
    local = own.sums / np.maximum(mine, 1)[:, None]
    shared = 1 + others.squares / np.square(np.maximum(theirs, 1))
    variance = (spread.between - common) * shared + within / np.maximum(theirs, 1)
    noise = within / np.maximum(mine, 1)
    precision = np.where(both, 1 / (variance + noise), 0.0)
    offset = common * (precision @ (local - general)) / (1 + common * precision.sum())
    weight = np.where(mine == 0, 0.0, np.where(theirs == 0, 1.0, variance / (variance + noise)))
    means = weight[:, None] * local + (1 - weight)[:, None] * (general + offset)
    known = (theirs > 0) | (mine > 0)
    return Means(np.where(known[:, None], means, 0.0), known, offset)


class Head(NamedTuple):
    """A linear classifier of features of length one, and what it rests on."""

    weight: np.ndarray  # [C, d]
    bias: np.ndarray  # [C]
    means: Means
    spread: Spread

    def logits(self, features: np.ndarray) -> np.ndarray:
        """[n, C] for features [n, d]."""
        return np.asarray(features @ self.weight.T + self.bias)


def estimate_whitening(spread: Spread) -> np.ndarray:
    """Directions [r, d]: vectors less what lies along them have whitened lengths, up to a factor.

    The whitening has the precision's least eigenvalues and, for all others, their mean.
    """
    eigenvalues, vectors = np.linalg.eigh(spread.precision)
    count = min(_WHITENED, len(eigenvalues) - 1)
    shares = np.maximum(1 - eigenvalues[:count] / eigenvalues[count:].mean(), 0)
    return np.asarray((vectors[:, :count] * np.sqrt(shares)).T)


def class_axes(means: Means, whitening: np.ndarray) -> ClassAxes | None:
    """What tells images that are like no class; None if fewer than two classes are known."""
    known = means.means[means.known]
    if len(known) < 2:
        return None
    middle = known.mean(0)
    apart = known - middle
    whitened = apart - apart @ whitening.T @ whitening
    lengths = np.sqrt(np.einsum("cd,cd->c", apart, whitened))[:, None]
    axes = whitened / np.maximum(lengths, np.finfo(np.float32).tiny)
    return ClassAxes(*(value.astype(np.float32) for value in (middle, axes, whitening)))


def fit(total: Sums, own: Sums, spread: Spread | None = None) -> Head:
    """The head of a plant that contributed `own` to `total`: both as they travel, whole numbers.

    How features vary is that of `total` unless it is given: with the inverse, it takes nearly all
    of the time.
    """
    spread = spread or estimate_spread(total.values())
    means = estimate_means(total.without(own).values(), own.values(), spread)
    return Head(*linear(means, spread), means, spread)


def leave_one_out(
    total: Sums,
    own: Sums,
    features: np.ndarray,
    labels: np.ndarray,
    groups: Sequence[Sequence[int]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and whitened cosines, [n, C], of a plant's images, each by a head without it.

    That is honest only where nothing else has learnt from the images: for a frozen encoder. The
    amounts of shrinkage and of spread are those of all images; an image left alone in its class
    does not join the single ones. A cosine is that between an image, the mean of its views, and a
    class's mean, from the middle of all classes; 0 without any.

    Args:
        total: of all plants, as it travels.
        own: what this plant contributed to it.
        features: [n, VIEWS, d], those that `own` was collected from; the first view is the one that
            is classified.
        labels: [n].
        groups: positions of images that are left out together, each once; by default each image is
            one.
    """
    values = total.values()
    others = total.without(own).values()
    mine = own.values()
    spread = estimate_spread(values)
    views = quantise(features)
    logits = np.empty((len(labels), len(mine.images)))
    cosines = np.empty_like(logits)
    scale = np.sqrt((1 - spread.shrinkage) / spread.freedom)
    for group in map(list, groups or np.arange(len(labels))[:, None]):
        left = views[group]
        of = labels[group]
        images = mine.images.copy()
        sums = mine.sums.copy()
        np.subtract.at(images, of, 1)
        np.subtract.at(sums, of, left.mean(1))
        means = estimate_means(others, mine._replace(images=images, sums=sums), spread)
        removed = scale * np.vstack(
            [
                _scatter_of(left[of == label], label, values, mine)
                for label in sorted({*of.tolist()})
            ]
        )
        logits[group], cosines[group] = _classify(left, means, spread.precision, removed)
    return logits, cosines


def _classify(
    images: np.ndarray, means: Means, precision: np.ndarray, removed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What `leave_one_out` returns for images [n, VIEWS, d]; `removed` [r,
    d] is what the covariance lacks (Woodbury).

    Both follow from inner products under the precision: the new one is never made.
    """
    known = means.means[means.known]
    points = np.vstack([images[:, 0], images.mean(1), known])
    count = len(points)
    number = len(images)
    inner = (stacked := np.vstack([points, removed])) @ precision @ stacked.T
    across = inner[:count, count:]
    inner = inner[:count, :count] + across @ np.linalg.solve(
        np.eye(len(removed)) - inner[count:, count:], across.T
    )
    scores = inner[:number, 2 * number :] - np.diag(inner)[2 * number :] / 2
    logits = np.repeat(scores.min(1, initial=0.0)[:, None] - _NEVER, len(means.known), 1)
    logits[:, means.known] = scores
    cosines = np.zeros_like(logits)
    if len(known) > 1:
        seen = inner[number:, number:]  # of the images' means over views and of the classes' means
        middle = seen[:, number:].mean(1)
        # as seen from the middle of the classes
        seen = seen - middle[:, None] - middle + middle[number:].mean()
        lengths = np.sqrt(np.maximum(np.diag(seen), _LEAST_VARIANCE))
        cosines[:, means.known] = seen[:number, number:] / (
            lengths[:number, None] * lengths[number:]
        )
    return logits, cosines


def expected_scale(spread: Spread) -> float:
    """The factor in 0..1 with which a head's logits probably fit images that it has not seen.

    A covariance that rests on few degrees of freedom is smaller along its own directions than it
    should be, and the head too certain.
    """
    return spread.freedom / (spread.freedom + _HALF_CERTAIN * len(spread.precision))


def fit_scale(logits: np.ndarray, labels: np.ndarray, expected: float | None = None) -> float:
    """The positive factor with which logits [n,
    C] of images that the head has not seen fit their labels [n] best.

    Least cross-entropy, as if there were one image more, whose label is drawn; or, where some
    factor is `expected`, allowing for that: so a few images that are all right do not make the head
    certain of everything, nor do wrong ones make it uncertain. 1 if there is no image.
    """
    if not len(labels):
        return 1.0
    target = (
        np.zeros(logits.shape)
        if expected
        else np.full(logits.shape, 1 / (logits.shape[1] * (len(labels) + 1)))
    )
    target[np.arange(len(labels)), labels] += 1 - target.sum(1)
    losses = []
    for scale in _SCALES:
        scaled = scale * (logits - logits.max(1, keepdims=True))
        loss = -float((target * (scaled - np.log(np.exp(scaled).sum(1, keepdims=True)))).sum())
        regularised = (
            loss + (np.log(scale / expected) / _SCALE_DEVIATION) ** 2 / 2 if expected else loss
        )
        losses.append(regularised)
    return float(_SCALES[int(np.argmin(losses))])


def _scatter_of(images: np.ndarray, label: int, total: Sums, own: Sums) -> np.ndarray:
    """Vectors whose outer products these images [n, VIEWS, d] of a class add to the scatter,
    [r, d].
    """
    means = images.mean(1)
    views = ((images - means[:, None]) / np.sqrt(VIEWS)).reshape(-1, images.shape[2])
    single = own.images[label] == 1
    count = total.singles[label] if single else own.images[label]
    single_sums = total.single_sums if single else own.sums
    centre = single_sums[label] / count
    apart = means - centre
    left = max(count - len(images), 1)  # where nothing is left, the mean of these is the centre
    return np.vstack([views, apart, apart.sum(0) / np.sqrt(left)])


def linear(means: Means, spread: Spread) -> tuple[np.ndarray, np.ndarray]:
    """Weight [C, d] and bias [C]; a class that nobody has gets a bias below all that others reach.

    What all classes' logits have in common is left out: it is hundreds of times larger than their
    differences, which would drown in float32.
    """
    centre = (
        means.means[means.known].mean(0) if means.known.any() else np.zeros(means.means.shape[1])
    )
    moved = np.where(means.known[:, None], means.means - centre, 0.0)
    weight = moved @ spread.precision
    bias = -np.einsum("cd,cd->c", weight, moved / 2 + centre)
    if not means.known.all():
        lowest = (bias - np.linalg.norm(weight, axis=1))[means.known].min(initial=0.0)
        bias = np.where(means.known, bias, lowest - _NEVER)
    return weight, bias
