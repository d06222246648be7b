"""Temperature, thresholds, and whether what is stated of them holds on images that nobody has
seen.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge.bundle.bundle_format import Confidence
from trainer.training.calibration import (
    MAX_DOUBT,
    MAX_ERROR_RATE,
    MIN_GROUPS,
    calibrate,
    find_threshold,
    fit_temperature,
    softmax,
)

CLASSES = ("a", "b", "c", "d")
ALIKE = np.ones(len(CLASSES))  # class priors as in training
GOOD = 12.0  # spread of logits of a model that is right of 94 % of images


def judged(
    count: int, seed: int, *, scale: float = 1.0, spread: float = 2.5
) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose softmax is the true distribution of the labels, times `scale`:
    1 is a calibrated model. The larger `spread`, the better it is.
    """
    random = np.random.default_rng(seed)
    logits = random.normal(0, spread, (count, len(CLASSES)))
    drawn = [random.choice(len(CLASSES), p=row) for row in softmax(logits)]
    return logits * scale, np.array(drawn)


def confidence_of(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray = ALIKE, **changes: Any
) -> Confidence:
    """The calibration on images of which none looks like another."""
    groups = [[number] for number in range(len(labels))]
    return calibrate(logits, labels, CLASSES, weights, groups, **changes).confidence


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_the_temperature_undoes_what_makes_a_model_too_sure_or_not_sure_enough(scale):
    logits, labels = judged(4000, 1, scale=scale)
    assert fit_temperature(logits, labels) == pytest.approx(scale, rel=0.1)


def test_a_few_images_that_are_all_right_do_not_make_a_model_infallible():
    labels = np.arange(20) % 4
    logits = 3.0 * np.eye(4)[labels]
    assert 0.3 < fit_temperature(logits, labels) < 2
    assert softmax(logits / fit_temperature(logits, labels)).max() < 0.99


def test_log_probabilities_are_as_good_as_logits():
    logits, labels = judged(60, 2, scale=3)
    assert fit_temperature(np.log(softmax(logits)), labels) == pytest.approx(
        fit_temperature(logits, labels), rel=1e-3
    )


def test_with_few_images_no_mistake_is_accepted_nor_a_verdict_less_sure_than_each_that_was_right():
    confidence = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    assert find_threshold(confidence, np.array([False, True, True, True, True])) == 0.6
    assert find_threshold(confidence, np.array([True, False, True, True, True])) == 0.7
    assert find_threshold(confidence, np.ones(5, bool)) == 0.5


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_people_are_never_asked_to_look_at_more_than_the_largest_share(verdicts):
    confidence = np.array([each for each, _ in verdicts])
    right = np.array([each for _, each in verdicts])
    threshold = find_threshold(confidence, right)
    assert (confidence < threshold).mean() <= MAX_DOUBT


def test_of_a_poor_model_the_least_certain_verdicts_are_in_doubt():
    confidence = np.linspace(0.1, 1.0, 10)
    right = np.arange(10) % 2 == 0  # the surest verdict is wrong
    assert find_threshold(confidence, right) == confidence[4]
    assert find_threshold(np.array([]), np.array([], bool)) == 1.0, "nothing is accepted unseen"


def test_with_many_images_the_surest_mistakes_within_the_share_are_accepted():
    confidence = np.linspace(0.001, 0.999, 499)
    right = np.ones(499, bool)
    right[[100, 200, 300, 400, 450]] = False  # allowed: 1 % of 500, less one
    assert confidence[100] < find_threshold(confidence, right) <= confidence[101]


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_no_more_is_wrong_and_accepted_than_was_promised(count):
    """By a model that is good enough for it: MAX_DOUBT does not bind."""
    fresh, truth = judged(20_000, 99, scale=2, spread=GOOD)
    mistakes = []
    for seed in range(40):
        found = confidence_of(*judged(count, seed, scale=2, spread=GOOD))
        sure = softmax(fresh / found.temperature).max(1)
        accepted = sure >= np.array(list(found.thresholds.values()))[fresh.argmax(1)]
        assert accepted.mean() > 1 - MAX_DOUBT
        mistakes.append((accepted & (fresh.argmax(1) != truth)).mean())
    of_a_class = count / len(CLASSES)
    assert np.mean(mistakes) < max(MAX_ERROR_RATE, 1 / (of_a_class + 1))


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_the_stated_coverage_and_accuracy_are_those_on_images_that_nobody_has_seen(count):
    fresh, truth = judged(20_000, 99)
    stated, found = [], []
    for seed in range(40):
        confidence = confidence_of(*judged(count, 1000 + seed))
        sure = softmax(fresh / confidence.temperature).max(1)
        accepted = sure >= np.array(list(confidence.thresholds.values()))[fresh.argmax(1)]
        if confidence.coverage:
            stated.append((confidence.coverage, confidence.accuracy))
            found.append((accepted.mean(), (fresh.argmax(1) == truth)[accepted].mean()))
    coverage, accuracy = np.mean(stated, 0) - np.mean(found, 0)
    assert abs(coverage) < 0.06
    # the rule was made from fewer images than the one that is stated
    assert -0.06 < accuracy < 0.02


def test_a_class_that_was_hardly_ever_predicted_has_the_threshold_of_all():
    logits, labels = judged(80, 5)
    logits[:, 3] = -20
    found = confidence_of(logits, labels)
    sure = softmax(logits / found.temperature).max(1)
    assert found.thresholds["d"] == pytest.approx(find_threshold(sure, logits.argmax(1) == labels))


def test_the_outputs_that_a_bundle_keeps_are_those_of_models_that_have_not_seen_the_image():
    logits, labels = judged(60, 3, scale=2)
    found = confidence_of(logits, labels)
    assert found.held_out is not None
    kept, probabilities, accepted = found.held_out.arrays(len(CLASSES))
    assert kept.tolist() == labels.tolist()
    assert accepted.mean() == pytest.approx(found.coverage)
    assert (probabilities.argmax(1) == labels)[accepted].mean() == pytest.approx(found.accuracy)
    fold = np.argsort(np.argsort(labels, kind="stable")) % 5
    others = fold != fold[7]
    scale = fit_temperature(logits[others], labels[others])
    assert probabilities[7] == pytest.approx(softmax(logits[7] / scale), abs=1e-3)


def test_of_very_many_images_a_bundle_keeps_some():
    held_out = confidence_of(*judged(2500, 1)).held_out
    assert held_out is not None
    assert len(held_out.accepted) == 2000


@pytest.mark.parametrize("groups", [[], [[*range(20)]]])
def test_too_few_groups_say_nothing(groups):
    assert len(groups) < MIN_GROUPS
    with pytest.raises(ValueError, match="at least"):
        calibrate(*judged(20, 0), CLASSES, ALIKE, groups)


def test_two_groups_judge_each_other():
    logits, labels = judged(12, 4)
    groups = [[*range(0, 12, 2)], [*range(1, 12, 2)]]
    found = calibrate(logits, labels, CLASSES, ALIKE, groups)
    assert (found.confidence.images, found.confidence.groups) == (12, 2)
    for mine, others in (groups, groups[::-1]):
        scale = fit_temperature(logits[others], labels[others])
        np.testing.assert_allclose(found.probabilities[mine], softmax(logits[mine] / scale))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=12, max_size=40), st.integers(0, 1000))
def test_no_image_is_judged_by_one_that_looks_like_it(numbers, seed):
    """Other labels of a group change what is said of others, but nothing of the group itself."""
    assume(len(set(numbers)) >= MIN_GROUPS)
    logits, labels = judged(len(numbers), seed)
    groups = [np.flatnonzero(np.array(numbers) == each).tolist() for each in sorted(set(numbers))]
    # all groups begin with one class, so that they stay in the folds where they are
    for group in groups:
        labels[group[0]] = 0
    before = calibrate(logits, labels, CLASSES, ALIKE, groups)
    changed = labels.copy()
    changed[groups[0][1:]] = (changed[groups[0][1:]] + 1) % len(CLASSES)
    after = calibrate(logits, changed, CLASSES, ALIKE, groups)
    assert np.array_equal(before.probabilities[groups[0]], after.probabilities[groups[0]])
    assert np.array_equal(before.taken[groups[0]], after.taken[groups[0]])


def test_verdicts_of_models_that_had_fewer_images_are_marked_and_their_errors_count_less():
    logits, labels = judged(60, 3)
    plain = confidence_of(logits, labels)
    assert (plain.left_out, plain.credit) == (False, 1.0)
    every = confidence_of(logits, labels, remaining=np.ones(60))
    assert (every.left_out, every.credit) == (True, 1.0)
    half = confidence_of(logits, labels, remaining=np.full(60, 0.5))
    few = confidence_of(logits, labels, remaining=np.full(60, 0.1))
    assert 0 <= few.credit < half.credit < 1
    assert half.thresholds == plain.thresholds


def test_under_a_prior_what_is_stated_is_of_the_labels_and_confidences_that_a_line_gives():
    logits, labels = judged(400, 6, spread=GOOD)
    mine = labels < 2  # this plant has images of a and b alone
    logits, labels, weights = logits[mine], labels[mine], np.array([1, 1, 0.2, 0.2])
    plain, found = (
        confidence_of(logits, labels),
        confidence_of(logits, labels, weights),
    )
    assert found.temperature == plain.temperature, "the graph knows no prior"
    assert found.coverage > plain.coverage
    shown = softmax(logits / found.temperature) * weights
    shown /= shown.sum(1, keepdims=True)
    taken = shown.argmax(1)
    for label in (0, 1):
        sure, right = shown.max(1)[taken == label], labels[taken == label] == label
        assert found.thresholds[CLASSES[label]] == pytest.approx(find_threshold(sure, right))
