"""How sure a model may be, from held-out images: temperature, reject thresholds, what they are worth. numpy alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

_COLDEST, _HOTTEST = 0.05, 20.0  # temperatures


def softmax(logits: Floats) -> Floats:
    """Probabilities of logits [..., C]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def temperature(logits: Floats, labels: NDArray[np.int64]) -> float:
    """The divisor of logits [n, C] under which the labels are likeliest (Guo et al. 2017).

    The labels are softened as if another image of each class had been found in every one's place once (Platt 1999):
    a few images that are all right do not make a model infallible.
    """
    count, classes = logits.shape
    targets = (np.eye(classes)[labels] * count + 1) / (count + classes)

    def loss(log_divisor: float) -> float:
        scaled = logits.astype(np.float64) / np.exp(log_divisor)
        scaled -= scaled.max(1, keepdims=True)
        return float((np.log(np.exp(scaled).sum(1)) - (targets * scaled).sum(1)).mean())

    return float(np.exp(_least(loss, np.log(_COLDEST), np.log(_HOTTEST))))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one valley is least, by golden section."""
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return float((low + high) / 2)
