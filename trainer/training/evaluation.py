"""Metrics of a classifier: accuracy, macro F1, macro AUC, intervals of an accuracy and of a difference of two."""

import math

import numpy as np


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
    """Area under the curve of each class against the rest, averaged over the classes that occur among the labels.

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


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `correct` among `count`."""
    z = 1.959964
    share = correct / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return min(share, centre - half), max(share, centre + half)  # the interval contains the share in spite of rounding


def paired_interval(first_right: np.ndarray, second_right: np.ndarray) -> tuple[float, float]:
    """95 % interval of the difference of two accuracies on the same images, second minus first, in -1..1.

    Newcombe's hybrid score interval for paired proportions (Statistics in Medicine 17:2635, 1998, method 10). It is not
    empty where both classifiers agree on every image: few images do not prove that they are equal.

    Args:
        first_right: whether the first classifier is right, bool [n], n >= 1.
        second_right: whether the second one is, likewise, image by image.
    """
    count = len(first_right)
    both = int((first_right & second_right).sum())
    second, first = int(second_right.sum()), int(first_right.sum())
    (low, high), (first_low, first_high) = wilson_interval(second, count), wilson_interval(first, count)
    difference = (second - first) / count
    correlation = _phi(both, second - both, first - both, count - first - second + both)
    down, up = second / count - low, high - second / count
    first_down, first_up = first / count - first_low, first_high - first / count
    below = math.sqrt(down * down - 2 * correlation * down * first_up + first_up * first_up)
    above = math.sqrt(up * up - 2 * correlation * up * first_down + first_down * first_down)
    return max(-1.0, difference - below), min(1.0, difference + above)


def _phi(both: int, second_only: int, first_only: int, neither: int) -> float:
    """Correlation of a fourfold table, a positive one with Newcombe's continuity correction; 0 if a margin is empty."""
    margins = (both + second_only) * (first_only + neither) * (both + first_only) * (second_only + neither)
    if margins == 0:
        return 0.0
    product = both * neither - second_only * first_only
    count = both + second_only + first_only + neither
    return (product if product < 0 else max(product - count / 2, 0)) / math.sqrt(margins)
