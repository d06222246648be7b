"""What labels of images kept at random say of a model, beside what its bundle promised."""

from typing import Any

import numpy as np
import pytest

from edge.labelling.field_accuracy import judge_field
from edge.uncertainty.performance import Proportion


def share(right: int, images: int) -> Proportion:
    found = Proportion.of([True] * right + [False] * (images - right))
    assert found
    return found


@pytest.mark.parametrize(
    ("right", "images", "promise"),
    [
        (95, 100, "kept"),
        (90, 100, "kept"),
        (75, 100, "missed"),
        (500, 500, "exceeded"),
        (1, 1, "kept"),
        (0, 3, "missed"),
    ],
)
def test_a_difference_is_told_where_it_is_no_accident(
    right: int, images: int, promise: str
) -> None:
    found = judge_field([True] * right + [False] * (images - right), 7, share(190, 200))
    assert found
    assert (found.accuracy.count, found.accuracy.images, found.waiting, found.promise) == (
        right,
        images,
        7,
        promise,
    )


def test_nothing_is_said_without_a_label_and_no_promise_is_judged_where_there_is_none() -> None:
    assert judge_field([], 3, share(190, 200)) is None
    found: Any = judge_field([True, False], 0, None)
    assert (found.accuracy.share, found.promise) == (0.5, None)


@pytest.mark.parametrize(("promised", "labelled"), [(60, 100), (200, 50), (1000, 1000)])
def test_of_models_that_keep_their_promise_one_in_twenty_is_told_otherwise(
    promised: int, labelled: int
) -> None:
    random = np.random.default_rng(0)
    told = []
    for right, held_out in zip(
        random.binomial(labelled, 0.93, 500), random.binomial(promised, 0.93, 500), strict=True
    ):
        low, high = share(int(right), labelled).difference(share(int(held_out), promised))
        told.append(low > 0 or high < 0)
    assert 0.02 < np.mean(told) < 0.08


def test_the_interval_of_a_difference_is_newcombe_s() -> None:
    """56 of 70 less 48 of 80: the example of his paper, method 10."""
    assert share(56, 70).difference(share(48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-4)
