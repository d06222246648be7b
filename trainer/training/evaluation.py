"""Metrics of a classifier: accuracy, macro F1, macro AUC, and the confidence interval of an accuracy."""

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
