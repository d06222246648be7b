"""Attacks on sums of features: counts, membership of an image, and pictures of what a class's mean looks like.

Of sums as they are, an image's features lie in the span of the scatter and the means if they are in them. So long as
there are fewer views than dimensions, that alone tells an image; beyond, its leverage does (the part of the scatter
that it makes, which is larger for what the scatter holds). Of noisy sums, what is left is how far an image points the
way of its class's sum (Dwork et al., FOCS 2015).
"""

import numpy as np

from trainer.audit.comparison import agreement, compare_pictures, membership
from trainer.audit.exposure import Found
from trainer.audit.feature_decoder import FeatureDecoder
from trainer.audit.observation import Observation
from trainer.audit.parts import Parts, attackers_own
from trainer.data.class_folders import LabelledImages
from trainer.methods.base import Statistics
from trainer.statistics.private_sums import PrivateSums
from trainer.statistics.sums import VIEWS, Sums
from trainer.training.training_set import TrainingSet

_RIDGE = 1e-7  # of the mean eigenvalue: more than the grid's rounding, less than an image's part
_LEAST_IMAGES = 0.5  # of a noisy class: with fewer its mean means nothing


def attack(seen: Observation, statistics: Statistics, parts: Parts, seed: int) -> Found:
    """Attack a plant's sums, or totals that hold them; what the attacker draws for itself follows from `seed`."""
    sent, unsent = parts.sent, parts.unsent
    own = attackers_own(parts.known, len(seen.spec.classes), seen.spec.preprocessing.size, seed)
    of_sent, of_unsent, of_own = (_views(seen, statistics, images) for images in (sent, unsent, own))
    is_private = seen.spec.privacy is not None
    counts, means = _read(seen)
    exposures = [agreement(counts, sent, "sums", "numbers are read" + (", noise and all" if is_private else ""))]
    labels = np.concatenate([sent.labels, unsent.labels])
    candidates = np.concatenate([of_sent, of_unsent])
    scores = _along_sums(seen, candidates, labels) if is_private else -_leverage(seen, candidates)
    exposures += membership(scores, len(sent.labels), "sums", "direction of the sum" if is_private else "leverage")
    decoder = FeatureDecoder(of_own.mean(1), own)
    known = [label for label in np.unique(sent.labels).tolist() if counts[label] >= _LEAST_IMAGES]
    made = [decoder.guess(means[label]) for label in known]
    found, pictures = compare_pictures(made, known, sent, unsent, "sums", "a guess from a class's mean", decoder.blind)
    return Found((*exposures, *found), pictures)


def _views(seen: Observation, statistics: Statistics, images: LabelledImages) -> np.ndarray:
    """What the sums are of: features [n, VIEWS, d]."""
    data = TrainingSet.of(images, seen.spec.preprocessing)
    return statistics.features(seen.network, seen.received, data)[""]


def _read(seen: Observation) -> tuple[np.ndarray, np.ndarray]:
    """Each class's number of images [C] and mean feature [C, d], as far as the coordinator knows them."""
    if seen.spec.privacy is not None:
        noisy = PrivateSums.of(seen.tensors).values()
        return noisy.images, noisy.sums / np.maximum(noisy.images, 1)[:, None]
    sums = Sums.of(seen.tensors).values()
    return sums.images, sums.sums / np.maximum(sums.images, 1)[:, None]


def _leverage(seen: Observation, views: np.ndarray) -> np.ndarray:
    """The mean over views [n, VIEWS, d] of v^T (M + ridge)^-1 v, M being all that is known of second moments."""
    sums = Sums.of(seen.tensors).values()
    plural = np.maximum(sums.images - sums.singles, 0)
    rest = sums.sums - sums.single_sums  # the products of singles' means are in the scatter
    means = rest / np.sqrt(np.maximum(plural, 1))[:, None]
    moment = sums.scatter + means.T @ means
    values, vectors = np.linalg.eigh(moment)
    ridge = max(_RIDGE * float(values.mean()), 2.0**-40)
    along = views.reshape(-1, views.shape[-1]) @ vectors
    found: np.ndarray = (np.square(along) / (np.maximum(values, 0) + ridge)).sum(1).reshape(-1, VIEWS).mean(1)
    return np.asarray(np.log(found))


def _along_sums(seen: Observation, views: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How far each image's features [n, VIEWS, d] point the way of its class's sum, beside the class's other images."""
    sums = PrivateSums.of(seen.tensors).values().sums
    scores = np.einsum("nd,nd->n", views.mean(1), sums[labels])
    for label in np.unique(labels):
        scores[labels == label] -= scores[labels == label].mean()
    return np.asarray(scores)
