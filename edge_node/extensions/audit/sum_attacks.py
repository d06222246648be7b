"""Attacks on sums of features: counts, membership of an image,
and pictures of what a class's mean looks like.

Of sums as they are, an image's features lie in the span of the scatter and the means if they are in
them. So long as there are fewer views than dimensions, that alone tells an image; beyond, its
leverage does (the part of the scatter that it makes, which is larger for what the scatter holds).
Of noisy sums, what is left is how far an image points the way of its class's sum (Dwork et al.,
FOCS 2015).
"""

import numpy as np

from edge_node.extensions.audit.attack_scores import agreement, compare_pictures, membership
from edge_node.extensions.audit.exposure import Found, Pictures
from edge_node.extensions.audit.feature_decoder import FeatureDecoder
from edge_node.extensions.audit.observation import Observation
from edge_node.extensions.audit.parts import Parts, attackers_own
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.methods.base import Statistics
from trainer.methods.statistics_head import take_below
from trainer.models.named_tensors import Arrays
from trainer.statistics.private_sums import PrivateSums
from trainer.statistics.sums import PREFIX, VIEWS, Sums

_RIDGE = 1e-7  # of the mean eigenvalue: more than the grid's rounding, less than an image's part
_LEAST_IMAGES = 0.5  # of a noisy class: with fewer its mean means nothing


def attack(seen: Observation, statistics: Statistics, parts: Parts, seed: int) -> Found:
    """Attack a plant's sums, or totals that hold them;
    what the attacker draws for itself follows from `seed`.
    """
    sent = parts.sent
    unsent = parts.unsent
    classes = len(seen.spec.classes)
    own = attackers_own(parts.known, classes, seen.spec.preprocessing.size, seed)
    of_sent, of_unsent, of_own = (
        _views(seen, statistics, images) for images in (sent, unsent, own)
    )
    is_private = seen.spec.privacy is not None
    read = "noisy numbers are read" if is_private else "numbers are read"
    exposures = [agreement(_sums(seen, "").images, sent, "sums", read)]
    pictures: list[Pictures] = []
    for encoder in of_sent:
        sums = _sums(seen, encoder)
        of = f" ({encoder})" if encoder else ""
        candidates = np.concatenate([of_sent[encoder], of_unsent[encoder]])
        if isinstance(sums, Sums):
            scores = -_leverage(sums, candidates)
            attacked = "leverage"
        else:
            labels = np.concatenate([sent.labels, unsent.labels])
            scores = _along_sums(sums, candidates, labels)
            attacked = "direction of the sum"
        exposures += membership(scores, len(sent.labels), "sums", attacked + of)
        decoder = FeatureDecoder(of_own[encoder].mean(1), own)
        known = [
            label
            for label in np.unique(sent.labels).tolist()
            if sums.images[label] >= _LEAST_IMAGES
        ]
        made = [decoder.guess(sums.sums[label] / sums.images[label]) for label in known]
        what = f"a guess from a class's mean{of}"
        found, some = compare_pictures(made, known, sent, unsent, "sums", what, decoder.blind)
        exposures += found
        pictures += some
    singles = np.count_nonzero(np.bincount(sent.labels) == 1)
    is_open = not (is_private or seen.spec.mask_threshold)
    notes = (f"of {singles} of its classes it has one image, whose features are read as they are",)
    told = notes if singles and is_open else ()
    return Found(tuple(exposures), tuple(pictures), told)


def _views(seen: Observation, statistics: Statistics, images: LabelledImages) -> Arrays:
    """What the sums are of: features [n, VIEWS, d], by the prefix of their encoder."""
    data = TrainingSet.of(images, seen.spec.preprocessing)
    features = statistics.features(seen.network, seen.received, data)
    return {name: each for name, each in features.items() if not name.startswith(PREFIX)}


def _sums(seen: Observation, encoder: str) -> Sums | PrivateSums:
    """What is known of the features that an encoder makes, float64."""
    tensors = take_below(encoder, seen.tensors)
    return (
        Sums.of(tensors).values() if seen.spec.privacy is None else PrivateSums.of(tensors).values()
    )


def _leverage(sums: Sums, views: np.ndarray) -> np.ndarray:
    """The mean over views [n, VIEWS, d] of v^T (M + ridge)^-1 v,
    M being all that is known of second moments.
    """
    plural = np.maximum(sums.images - sums.singles, 0)
    rest = sums.sums - sums.single_sums  # the products of singles' means are in the scatter
    means = rest / np.sqrt(np.maximum(plural, 1))[:, None]
    moment = sums.scatter + means.T @ means
    values, vectors = np.linalg.eigh(moment)
    ridge = max(_RIDGE * float(values.mean()), 2.0**-40)
    along = views.reshape(-1, views.shape[-1]) @ vectors
    found: np.ndarray = (
        (np.square(along) / (np.maximum(values, 0) + ridge)).sum(1).reshape(-1, VIEWS).mean(1)
    )
    return np.asarray(np.log(found))


def _along_sums(totals: PrivateSums, views: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How far each image's features [n, VIEWS, d] point the way of its class's sum,
    beside the class's other images.
    """
    scores = np.einsum("nd,nd->n", views.mean(1), totals.sums[labels])
    for label in np.unique(labels):
        scores[labels == label] -= scores[labels == label].mean()
    return np.asarray(scores)
