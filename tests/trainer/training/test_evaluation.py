"""Figures of merit against values computed by hand."""

import numpy as np
import pytest

from trainer.training.evaluation import accuracy, macro_f1, wilson_interval

LABELS = np.array([0, 0, 0, 1, 1, 2])
PREDICTED = np.array([0, 0, 1, 1, 2, 2])


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert accuracy(PREDICTED, LABELS) == pytest.approx(4 / 6)


def test_macro_f1_is_the_mean_of_each_classs_f1() -> None:
    # Class 0: precision 2/2, recall 2/3, F1 4/5. Class 1: 1/2, 1/2, 1/2. Class 2: 1/2, 1/1, 2/3.
    assert macro_f1(PREDICTED, LABELS) == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 3)


def test_macro_f1_counts_each_class_alike_however_many_images_it_has() -> None:
    labels = np.array([0] * 98 + [1] * 2)
    assert accuracy(np.zeros(100), labels) == pytest.approx(0.98)
    assert macro_f1(np.zeros(100), labels) == pytest.approx(0.5 * 2 * 98 / 198)


def test_a_class_that_only_the_model_names_lowers_the_others_but_has_no_f1_of_its_own() -> None:
    assert macro_f1(np.array([0, 0, 5, 1]), np.array([0, 0, 0, 1])) == pytest.approx((4 / 5 + 1) / 2)


def test_right_answers_alone_score_one_and_wrong_ones_alone_zero() -> None:
    for figure in (accuracy, macro_f1):
        assert figure(LABELS, LABELS) == 1
        assert figure(LABELS + 3, LABELS) == 0


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [  # tables of the score interval; the last is an example of Newcombe 1998
        (8, 10, 0.490, 0.943),
        (0, 10, 0.0, 0.278),
        (10, 10, 0.722, 1.0),
        (15, 148, 0.0624, 0.1605),
    ],
)
def test_wilsons_interval_is_the_published_one(correct: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(correct, count) == pytest.approx((low, high), abs=5e-4)


def test_wilsons_bounds_are_where_the_share_is_just_not_rejected() -> None:
    for bound in wilson_interval(13, 40):
        assert abs(13 / 40 - bound) == pytest.approx(1.959964 * np.sqrt(bound * (1 - bound) / 40))


def test_more_images_narrow_the_interval() -> None:
    widths = [np.diff(wilson_interval(3 * count, 4 * count))[0] for count in (1, 10, 100)]
    assert widths == sorted(widths, reverse=True)
