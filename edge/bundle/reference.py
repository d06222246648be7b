"""Reference statistics of a model's held-out images, against which novelty,
disagreement and drift are measured.

Novelty is the distance to the nearest held-out image in the classifier's features (Sun et al.
2022), the best of the scores that `research/studies/novelty.py` compares; of a consensus head that
to the nearest class mean in whitened features, by `research/studies/novelty_of_head.py`. For drift
an image is compared with those of the same predicted class, so that other shares of the classes
than among the held-out images are no drift. Needs numpy alone.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as read
from safetensors.numpy import save

from edge.bundle.bundle_format import Bundle, BundleError, copied_to_memory

Floats = NDArray[np.float32]

LEAST = 5  # images of a class to have a mean of its own; smaller classes share that of all images
EMBEDDED = 128  # numbers that tell how alike images are
MOST = 128  # images whose features are kept: measuring novelty takes 20 microseconds
# least deviation of a feature, in root mean squares of all: many are zero on a few dozen images
_FLOOR = 0.1


class ClassAxes(NamedTuple):
    """Axes from the middle of all classes to the mean of each,
    in features that are whitened within classes.

    Whitened lengths are those of features less what lies along `within`: up to a factor a
    Mahalanobis distance whose precision has low rank but for a multiple of the identity.
    """

    middle: Floats  # [features]
    # [classes, features]: inner products with these are whitened ones with vectors of length 1
    classes: Floats
    within: Floats  # [directions, features], in which images of one class differ most

    def distance(self, features: Floats) -> Floats:
        """[..., F] -> [...]: 1 - whitened cosine to the nearest class mean,
        seen from the middle, from 0 to 2.

        Of features side by side the first are taken.
        """
        moved = _unit(features[..., : self.middle.size]) - self.middle
        squared = np.square(moved).sum(-1) - np.square(moved @ self.within.T).sum(-1)
        return np.asarray(
            1 - (moved @ self.classes.T).max(-1) / np.sqrt(np.maximum(squared, 1e-12))
        )


class Reference(NamedTuple):
    """Statistics of the held-out images."""

    features: Floats  # [images, features], of length 1; at most MOST of them, none with `axes`
    novelty: Floats  # [images], sorted: of each among the others, or by `axes`
    disagreement: Floats  # [images], sorted; none for a model with one encoder
    means: Floats  # [classes, features], by predicted class
    # [classes]: images of that; with fewer than LEAST the mean of all stands in `means`
    counts: NDArray[np.int64]
    deviation: Floats  # [features], standard, of images of one class
    # [classes]: mean square of standardised features, of images left out of the statistics
    spread: Floats
    freedom: float  # effective degrees of freedom of the features (Satterthwaite)
    axes: ClassAxes | None = None  # of a consensus head, which has not seen the held-out images

    @staticmethod
    def from_features(
        features: Floats,
        labels: NDArray[np.int64],
        classes: int,
        opinions: Floats | None = None,
        axes: ClassAxes | None = None,
    ) -> "Reference":
        """From features [N, F], predicted classes [N] and the encoders' probabilities [N, E, C].

        ValueError for fewer than two images.
        """
        if len(features) < 2:
            raise ValueError("a reference takes at least two images")
        counts = np.bincount(labels, minlength=classes)
        means = np.broadcast_to(features.mean(0), (classes, features.shape[1])).copy()
        own = counts >= LEAST
        for label in np.flatnonzero(own):
            means[label] = features[labels == label].mean(0)
        residuals = features - means[labels]
        of_mean = np.where(own, counts, len(features))[labels][:, None]
        squares = residuals**2 * (of_mean / (of_mean - 1))
        variance = squares.mean(0)
        # with which each image itself is measured
        others = (variance * len(features) - squares) / (len(features) - 1)
        strayed = (squares / _floored(others)).mean(1)
        deviation = np.sqrt(_floored(variance))
        spread = []
        for each in range(classes):
            chosen_labels = labels == each if own[each] else slice(None)
            spread.append(strayed[chosen_labels].mean())
        if axes:
            kept = features[:0]
            novelty = axes.distance(features)
        else:
            kept = _unit(features)[
                np.linspace(0, len(features) - 1, min(len(features), MOST)).astype(int)
            ]
            novelty = 1 - (kept @ kept.T - 2 * np.eye(len(kept))).max(1)
        disagreements = (
            np.sort(disagreement(opinions)) if opinions is not None else np.empty(0, np.float32)
        )
        return Reference(
            features=kept.astype(np.float32),
            novelty=np.sort(novelty).astype(np.float32),
            disagreement=disagreements,
            means=means.astype(np.float32),
            counts=counts.astype(np.int64),
            deviation=deviation.astype(np.float32),
            spread=np.array(spread, np.float32),
            freedom=_freedom(residuals / deviation),
            axes=axes,
        )

    def nearest_distance(self, features: Floats) -> Floats:
        """[..., F] -> [...]: 1 - cosine to the nearest held-out image or class mean: 0,
        the same direction, to 2.
        """
        if self.axes:
            return self.axes.distance(features)
        return np.asarray(1 - (_unit(features) @ self.features.T).max(-1))

    def standardised(self, features: Floats, label: int) -> Floats:
        """[..., F]: how far features are from the mean of their class, in standard deviations."""
        return np.asarray((features - self.means[label]) / self.deviation)

    def embedding(self, features: Floats) -> Floats:
        """[F] -> [EMBEDDED]: features standardised by all images, on random directions.

        The cosine of two images' embeddings tells how alike the model finds them.
        """
        return np.asarray(
            (features - self.means.mean(0)) / self.deviation @ _directions(features.shape[-1])
        )

    def expected_square(self, shares: Floats, variance: float) -> float:
        """Expected mean square of averaged standardised features,
        for ordinary images with these shares of classes [C].

        `variance`: of an average of independent values of variance 1. The remaining terms are the
        errors of the means themselves, which few images determine.
        """
        own = self.counts >= LEAST
        spread = shares * self.spread
        of_means = (shares * spread)[own] / self.counts[own]
        of_all = shares[~own].sum() * spread[~own].sum() / self.counts.sum()
        return float(variance * spread.sum() + of_means.sum() + of_all)

    def encode(self) -> bytes:
        """The content of a bundle's reference file."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        if self.axes:
            arrays |= {f"{_AXES}{name}": value for name, value in self.axes._asdict().items()}
        return bytes(save({name: np.ascontiguousarray(value) for name, value in arrays.items()}))


_ARRAYS = Reference._fields[:-1]
_AXES = "axes."


def load_reference(found: Bundle) -> Reference | None:
    """The reference of a bundle, if it has one;
    BundleError when its file does not match the manifest.
    """
    part = found.manifest.reference
    manifest = found.manifest
    if part is None or "features" not in manifest.extras:
        return None
    with copied_to_memory(found.folder, part) as path:
        content = path.read_bytes()
    try:
        tensors = read(content)
        parts = {
            name.removeprefix(_AXES): tensors[name] for name in tensors if name.startswith(_AXES)
        }
        axes = ClassAxes(**parts) if parts else None
        reference = Reference(**{name: tensors[name] for name in _ARRAYS}, axes=axes)
    except (SafetensorError, KeyError, TypeError) as error:
        raise BundleError(
            f"{found.folder / part.file} is damaged: {error}", "export the model again"
        ) from error
    classes = len(manifest.classes)
    images = reference.novelty.size
    features = reference.deviation.size
    beyond = 0 if axes else images
    shapes = [(beyond, features), (images,), (reference.disagreement.size,)]
    shapes += [(classes, features), (classes,), (features,), (classes,), (1,)]
    found_shapes = [tensors[name].shape for name in _ARRAYS]
    if axes:
        width = min(axes.middle.size, features)
        shapes += [(width,), (max(len(axes.classes), 1), width), (len(axes.within), width)]
        found_shapes += [value.shape for value in axes]
    if not images or found_shapes != shapes:
        raise BundleError(
            f"{found.folder / part.file} is of another model", "export the model again"
        )
    return reference._replace(freedom=tensors["freedom"].item())


def disagreement(opinions: Floats) -> Floats:
    """Jensen-Shannon divergence of encoders' probabilities [N, E, C]: [N], from 0
    (same) to 1 (each its own class).
    """
    encoders = opinions.shape[1]
    if encoders == 1:
        return np.zeros(len(opinions), np.float32)
    divergence = _entropy(opinions.mean(1)) - _entropy(opinions).mean(1)
    return np.asarray(np.clip(divergence / np.log(encoders), 0, 1), np.float32)


def quantile(ordered: Floats, share: float) -> float:
    """The limit that at most 1 - `share` of similar images exceed on average
    (split conformal prediction).

    The largest of `ordered` when they are too few for that.
    """
    rank = int(np.ceil((len(ordered) + 1) * share))
    return float(ordered[min(rank, len(ordered)) - 1])


@lru_cache(1)
def _directions(features: int) -> Floats:
    return np.random.default_rng(0).standard_normal((features, EMBEDDED), np.float32)


def _floored(variance: Floats) -> Floats:
    """[..., F], each raised to a fraction of their mean at least."""
    return np.asarray(np.maximum(variance, _FLOOR**2 * variance.mean(-1, keepdims=True)) + 1e-12)


def _unit(features: Floats) -> Floats:
    return np.asarray(features / (np.linalg.norm(features, axis=-1, keepdims=True) + 1e-12))


def _entropy(probabilities: Floats) -> Floats:
    """[..., C] -> [...], in nats."""
    return np.asarray(-(probabilities * np.log(np.maximum(probabilities, 1e-12))).sum(-1))


def _freedom(standardised: Floats) -> float:
    """(sum of eigenvalues)² / (sum of their squares) of the correlation of rows [N, F];
    too small with few rows.
    """
    products = standardised @ standardised.T
    return float(np.trace(products) ** 2 / max(float((products**2).sum()), 1e-12))
