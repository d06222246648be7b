"""Metrics of a classifier and their confidence intervals,
and the comparison of a node's candidates by them.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from edge.bundle.comparison import Candidate, CandidateName, Comparison
from edge.inference.class_prior import UNTAUGHT
from edge.uncertainty.performance import wilson_interval

# of accuracy during training, in shares and images, from which it is worth a word
_FALL = 0.05
_FALLEN_IMAGES = 2
_LEAD = 1  # images by which another candidate must be better than the mix, and one more


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of correct predictions, in 0..1."""
    return float(np.mean(predicted == labels))


def macro_f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """F1 averaged over the classes that occur among the labels, in 0..1."""
    scores = []
    for label in np.unique(labels):
        hits = np.sum((predicted == label) & (labels == label))
        scores.append(2 * hits / (np.sum(predicted == label) + np.sum(labels == label)))
    return float(np.mean(scores))


def macro_auc(shares: np.ndarray, labels: np.ndarray) -> float:
    """Area under the curve of each class against the rest,
    averaged over the classes that occur among the labels.

    NaN if only one class occurs.

    Args:
        shares: scores of the classes, [n, classes].
        labels: true classes, [n].
    """
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415  (slow to import)

    found = np.unique(labels)
    if len(found) < 2:
        return math.nan
    return float(np.mean([roc_auc_score(labels == label, shares[:, label]) for label in found]))


def paired_interval(
    first_right: np.ndarray, second_right: np.ndarray, independent: float = 1.0
) -> tuple[float, float]:
    """95 % interval of the difference of two accuracies on the same images,
    second minus first, in -1..1.

    Newcombe's hybrid score interval for paired proportions (Statistics in Medicine 17:2635, 1998,
    method 10). It is not empty where both classifiers agree on every image: few images do not prove
    that they are equal.

    Args:
        first_right: whether the first classifier is right, bool [n], n >= 1.
        second_right: whether the second one is, likewise, image by image.
        independent: groups of look-alikes for each image; such a group is one piece of evidence.
    """
    count = independent * len(first_right)
    both = independent * int((first_right & second_right).sum())
    second = independent * int(second_right.sum())
    first = independent * int(first_right.sum())
    (low, high) = wilson_interval(second, count)
    (first_low, first_high) = wilson_interval(first, count)
    difference = (second - first) / count
    correlation = _phi(both, second - both, first - both, count - first - second + both)
    down = second / count - low
    up = high - second / count
    first_down = first / count - first_low
    first_up = first_high - first / count
    below = math.sqrt(down * down - 2 * correlation * down * first_up + first_up * first_up)
    above = math.sqrt(up * up - 2 * correlation * up * first_down + first_down * first_down)
    return max(-1.0, difference - below), min(1.0, difference + above)


def _phi(both: float, second_only: float, first_only: float, neither: float) -> float:
    """Correlation of a fourfold table, a positive one with Newcombe's continuity correction;
    0 if a margin is empty.
    """
    margins = (
        (both + second_only)
        * (first_only + neither)
        * (both + first_only)
        * (second_only + neither)
    )
    if margins == 0:
        return 0.0
    product = both * neither - second_only * first_only
    count = both + second_only + first_only + neither
    corrected = product if product < 0 else max(product - count / 2, 0)
    return corrected / math.sqrt(margins)


def predict_among(logits: np.ndarray, own: Sequence[int]) -> np.ndarray:
    """The likeliest of the classes `own` for each image, [n], from logits [n, classes]."""
    return np.asarray(np.asarray(own)[logits[:, own].argmax(1)])


def predict_in_service(logits: np.ndarray, own: Sequence[int]) -> np.ndarray:
    """The likeliest class for each image, [n], as a line predicts by default,
    from logits [n, classes].

    All classes are candidates, but those that the plant has not taught at less weight.
    """
    weights = np.full(logits.shape[1], UNTAUGHT)
    weights[own] = 1
    return np.asarray((logits + np.log(weights)).argmax(1))


def compare(
    logits: Mapping[CandidateName, np.ndarray],
    labels: np.ndarray,
    own: Sequence[int],
    history: Sequence[float],
    *,
    deployed: CandidateName,
    cross_validated: bool,
    independent: float = 1.0,
) -> Comparison:
    """Compare a node's candidates.

    Args:
        logits: of each candidate, [n, classes], for the same images, none of which trained it.
        labels: the images' classes, [n], all of them `own`.
        own: labels of the classes that the node has training images of.
        history: accuracies of `together` among own classes, during training.
        deployed: the candidate that was chosen.
        cross_validated: whether each image was left out of the model that predicts it.
        independent: groups of look-alikes for each image.
    """
    right = {name: predict_in_service(each, own) == labels for name, each in logits.items()}
    alone = right["alone"]
    return Comparison(
        images=len(labels),
        cross_validated=cross_validated,
        guessing=float(np.bincount(labels).max() / len(labels)),
        deployed=deployed,
        fall=_fall(history, accuracy(predict_among(logits["together"], own), labels), len(labels)),
        alone=_candidate(alone, alone, independent),
        together=_candidate(right["together"], alone, independent),
        mixed=_candidate(right["mixed"], alone, independent),
    )


def _candidate(right: np.ndarray, alone: np.ndarray, independent: float) -> Candidate:
    low, high = wilson_interval(independent * int(right.sum()), independent * len(right))
    gain_low, gain_high = paired_interval(alone, right, independent)
    return Candidate(
        accuracy=float(right.mean()),
        low=low,
        high=high,
        gain=float(right.mean() - alone.mean()),
        gain_low=gain_low,
        gain_high=gain_high,
    )


def choose_trained(
    logits: Mapping[CandidateName, np.ndarray], labels: np.ndarray, own: Sequence[int]
) -> CandidateName:
    """Return the trained candidate to deploy: the mix, unless another leads by some images.

    On tuning images the mix lost least against the best of the three where a handful of images
    chose, and a significance test never fires on so few (research/results/afedcl/README.md). And
    none of these images shows what a node lacks that was trained alone: it takes each image of
    another class for one of its own. A node that has one class alone learns nothing of any other by
    itself, and is always right: it deploys `together`.

    Args:
        logits: of each candidate, [n, classes], for the same images, none of which trained it.
        labels: the images' classes, [n], all of them `own`.
        own: labels of the classes that the node has training images of.
    """
    if len(own) < 2:
        return "together"
    right = {
        name: int((predict_in_service(each, own) == labels).sum()) for name, each in logits.items()
    }
    right["mixed"] += _LEAD
    order: tuple[CandidateName, ...] = ("mixed", "together", "alone")
    return max(order, key=lambda name: right[name])


def _fall(history: Sequence[float], last: float, images: int) -> tuple[float, float] | None:
    """The highest accuracy during training and the last one, if that is clearly lower."""
    highest = max(history, default=last)
    return (highest, last) if highest - last >= max(_FALL, _FALLEN_IMAGES / images) - 1e-9 else None
