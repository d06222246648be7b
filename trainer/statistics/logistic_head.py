"""A plant's own classifier: logistic regression on the frozen features of its images alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STRENGTHS = (0.1, 1.0, 10.0)
"""How far weights may grow: the inverse of the penalty on their squares, for each image."""

_NEVER = 10.0  # how far the logit of a class without an image lies below all others
_ITERATIONS = 1000


class Linear(NamedTuple):
    """A linear classifier of features of length one."""

    weight: np.ndarray  # [C, d]
    bias: np.ndarray  # [C]

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Return the logits [n, C] of features [n, d]."""
        return np.asarray(features @ self.weight.T + self.bias)


def fit(
    features: np.ndarray, labels: Sequence[int] | np.ndarray, classes: int, strength: float
) -> Linear:
    """Fit the classifier to the views of a plant's images.

    The features are centred and divided by one number, so that `strength` means the same for
    every encoder. A class without an image gets a logit below all others.

    Args:
        features: [n, V, d], of length one at most.
        labels: [n], the classes of the images.
        classes: C, of the federation.
        strength: one of STRENGTHS. An image counts once, whatever its number of views.
    """
    known = np.unique(labels)
    weight = np.zeros((classes, features.shape[2]))
    bias = np.zeros(classes)
    if len(known) > 1:
        weight[known], bias[known] = _regress(features, np.asarray(labels), strength)
    lowest = (bias - np.linalg.norm(weight, axis=1))[known].min(initial=0.0)
    bias[np.setdiff1d(np.arange(classes), known)] = lowest - _NEVER
    return Linear(weight, bias)


def _regress(
    features: np.ndarray, labels: np.ndarray, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [k, d] and biases [k] of the classes that occur, in order."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  (slow to import)

    views = features.shape[1]
    width = features.shape[2]
    rows = features.reshape(-1, width).astype(np.float64)
    middle = rows.mean(0)
    scale = max(float(np.sqrt(np.square(rows - middle).mean())), 1e-12)
    model = LogisticRegression(C=strength / views, max_iter=_ITERATIONS)
    model.fit((rows - middle) / scale, np.repeat(labels, views))
    weight = model.coef_ / scale
    bias = model.intercept_ - weight @ middle
    if len(weight) == 1:  # two classes share one logit
        weight = np.concatenate([-weight, weight]) / 2
        bias = np.concatenate([-bias, bias]) / 2
    return weight, bias
