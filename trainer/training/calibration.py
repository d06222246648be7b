"""Calibration on images that a model has not seen: temperature, thresholds of doubt,
and their coverage and accuracy. numpy alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.bundle.bundle_format import Confidence, HeldOut
from edge.inference.class_prior import reweight

Floats = NDArray[np.floating[Any]]
Labels = NDArray[np.int64]

MIN_GROUPS = 2  # of look-alikes, below which nothing is said
MAX_ERROR_RATE = 0.01  # largest share of a class's verdicts that may be accepted and wrong
MAX_DOUBT = 0.4  # largest share of verdicts that is put in doubt: people cannot look at more
_LEARNING = 1.5
_MIN_CLASS_IMAGES = 5  # images taken for a class, below which it has no threshold of its own
_FOLDS = 5
_MOST_HELD_OUT = 2000  # images whose outputs a bundle keeps: 60 kB for ten classes
# temperatures
_MIN_TEMPERATURE = 0.05
_MAX_TEMPERATURE = 20.0


class Calibrated(NamedTuple):
    """A calibration, and the verdicts on its images with temperature and prior, cross-fitted."""

    confidence: Confidence
    taken: Labels  # [n], the predicted classes
    probabilities: Floats  # [n, C], of the graph


def calibrate(
    logits: Floats,
    labels: Labels,
    classes: Sequence[str],
    weights: Floats,
    groups: Sequence[Sequence[int]] | None = None,
    remaining: Floats | None = None,
) -> Calibrated:
    """Return what the logits of unseen images tell of the confidence.

    Temperature and thresholds come from all of the images. Coverage, accuracy and the outputs that
    the bundle keeps are cross-fitted: each group of images is judged by temperature and thresholds
    that the others gave.

    Args:
        logits: [n, C], or log-probabilities.
        labels: [n].
        classes: C names.
        weights: [C], by which class priors on a line differ from those in training. They act on all
            but the temperature and the outputs that are kept, which are the graph's.
        groups: positions of images that look alike, each once; by default each image is one.
        remaining: [n], where each image was left out of the model that judged it: the part of its
            class's images that this model had. None if the model itself judged it.

    Raises:
        ValueError: there are fewer groups than MIN_GROUPS.
    """
    if groups is None:
        groups = [[number] for number in range(len(labels))]
    if len(groups) < MIN_GROUPS:
        raise ValueError(f"a calibration takes at least {MIN_GROUPS} groups of images")
    divisor, least = _fit(logits, labels, weights)
    accepted = np.zeros(len(labels), bool)
    probabilities = np.zeros(logits.shape)
    taken = np.zeros_like(labels)
    # each fold has its share of every class
    ordered = sorted(groups, key=lambda group: labels[group[0]])
    fold = np.empty(len(labels), np.int64)
    for number, group in enumerate(ordered):
        fold[list(group)] = number % _FOLDS
    for number in range(min(_FOLDS, len(groups))):
        judged = fold == number
        scale, limits = _fit(logits[~judged], labels[~judged], weights)
        probabilities[judged] = softmax(logits[judged] / scale)
        taken[judged], sureness = _predict(logits[judged], scale, weights)
        accepted[judged] = sureness >= limits[taken[judged]]
    right = taken == labels
    some = np.linspace(0, len(labels) - 1, min(len(labels), _MOST_HELD_OUT)).astype(int)
    accuracy = float(right[accepted].mean()) if accepted.any() else 0.0
    credit = 1.0 if remaining is None else _credit(remaining[~right])
    confidence = Confidence(
        images=len(labels),
        groups=len(groups),
        left_out=remaining is not None,
        credit=credit,
        temperature=divisor,
        coverage=float(accepted.mean()),
        accuracy=accuracy,
        thresholds=dict(zip(classes, least.tolist(), strict=True)),
        held_out=HeldOut.of(labels[some], probabilities[some], accepted[some]),
    )
    return Calibrated(confidence, taken, probabilities)


def _credit(remaining: Floats) -> float:
    """Return the part of the errors that a model makes that had all of the images.

    An error counts less, the fewer images of its class were left: on tuning images the share of
    errors falls with about the power _LEARNING of their number.
    """
    return float((remaining**_LEARNING).mean()) if len(remaining) else 1.0


def _predict(logits: Floats, divisor: float, weights: Floats) -> tuple[Labels, Floats]:
    """The predicted class of each image, and its probability."""
    probabilities = reweight(softmax(logits / divisor), weights)
    return probabilities.argmax(1), probabilities.max(1)


def _fit(logits: Floats, labels: Labels, weights: Floats) -> tuple[float, Floats]:
    """The temperature, and the least confidence of each class [C] that is accepted."""
    divisor = fit_temperature(logits, labels)
    taken, confidence = _predict(logits, divisor, weights)
    right = taken == labels
    common = find_threshold(confidence, right)
    thresholds = []
    for label in range(logits.shape[1]):
        threshold = (
            find_threshold(confidence[of], right[of])
            if (of := taken == label).sum() >= _MIN_CLASS_IMAGES
            else common
        )
        thresholds.append(threshold)
    return divisor, np.array(thresholds)


def find_threshold(confidence: Floats, right: NDArray[np.bool_]) -> float:
    """The least confidence at which verdicts [n] are accepted; 1 if none are.

    Wrong verdicts that are accepted, plus one, are at most MAX_ERROR_RATE of n + 1: then the same
    share at most of future verdicts like these is expected to be accepted and wrong (conformal risk
    control, Angelopoulos et al. 2022). Where n is too small for that, no wrong one may be accepted;
    and none that is less certain than every right one. But no more than MAX_DOUBT of the verdicts
    are put in doubt, the least certain ones: of a poor model more wrong ones are then accepted.
    """
    allowed = max(0, int(MAX_ERROR_RATE * (len(right) + 1)) - 1)
    wrong = np.sort(confidence[~right])[::-1]
    barred = wrong[allowed] if len(wrong) > allowed else -1.0
    strict = float(min(confidence[right & (confidence > barred)], default=1.0))
    if not len(confidence):
        return strict
    return min(strict, float(np.sort(confidence)[int(MAX_DOUBT * len(confidence))]))


def softmax(logits: Floats) -> Floats:
    """Probabilities of logits [..., C]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def fit_temperature(logits: Floats, labels: Labels) -> float:
    """The divisor of logits [n, C] under which the labels are likeliest (Guo et al. 2017).

    The labels are softened as if half an image more had been of any class at random (after Platt
    1999): a few images that are all right do not make a model infallible. More makes it needlessly
    unsure, on tuning images.
    """
    count, classes = logits.shape
    targets = (np.eye(classes)[labels] * count + 0.5 / classes) / (count + 0.5)

    def loss(log_divisor: float) -> float:
        scaled = logits.astype(np.float64) / np.exp(log_divisor)
        scaled -= scaled.max(1, keepdims=True)
        return float((np.log(np.exp(scaled).sum(1)) - (targets * scaled).sum(1)).mean())

    return float(np.exp(_minimise(loss, np.log(_MIN_TEMPERATURE), np.log(_MAX_TEMPERATURE))))


def _minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one valley is least, by golden section."""
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(60):
        left = high - ratio * (high - low)
        right = low + ratio * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return float((low + high) / 2)
