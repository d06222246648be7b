"""Statistics over seeds, against values worked out by hand and by scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from research.runner import statistics


def test_the_deviation_is_that_of_a_sample() -> None:
    spread = statistics.spread([1.0, 2.0, 6.0])
    assert spread.mean == 3.0
    assert spread.deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert spread.size == 3


def test_one_value_has_a_mean_and_no_deviation() -> None:
    spread = statistics.spread([0.5])
    assert (spread.mean, spread.size) == (0.5, 1)
    assert math.isnan(spread.deviation)


def test_differences_are_paired_by_seed_with_students_interval() -> None:
    # Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t(2 degrees of freedom) = 4.3027.
    difference = statistics.paired_difference({0: 0.9, 1: 0.6, 2: 0.8}, {2: 0.5, 1: 0.4, 0: 0.8})
    assert difference is not None
    assert difference.mean == pytest.approx(0.2)
    assert difference.half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert (difference.pairs, difference.left_out) == (3, 0)


def test_the_interval_of_differences_is_scipys() -> None:
    random = np.random.default_rng(3)
    first, second = random.normal(size=(2, 6))
    difference = statistics.paired_difference(dict(enumerate(first)), dict(enumerate(second)))
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert difference is not None
    assert difference.mean - difference.half == pytest.approx(interval.low)
    assert difference.mean + difference.half == pytest.approx(interval.high)


def test_a_seed_that_one_side_lacks_is_left_out_of_a_comparison() -> None:
    difference = statistics.paired_difference({0: 0.9, 1: 0.6, 5: 0.0}, {0: 0.8, 1: 0.4, 7: 1.0})
    assert difference is not None
    assert difference.mean == pytest.approx(0.15)
    assert (difference.pairs, difference.left_out) == (2, 2)


def test_a_single_pair_has_no_interval_and_none_no_difference() -> None:
    difference = statistics.paired_difference({0: 0.9}, {0: 0.8, 1: 0.7})
    assert difference is not None
    assert math.isnan(difference.half)
    assert statistics.paired_difference({0: 0.9}, {1: 0.9}) is None


def test_ranks_count_from_the_highest_and_ties_share_theirs() -> None:
    values = {
        "a": {("s", 0): 0.9, ("s", 1): 0.5, ("t", 0): 0.1},
        "b": {("s", 0): 0.8, ("s", 1): 0.5, ("t", 0): 0.3},
        "c": {("s", 0): 0.1, ("s", 1): 0.2, ("t", 0): 0.2},
    }
    ranks = statistics.mean_ranks(values)
    assert ranks.mean == pytest.approx(
        {"a": (1 + 1.5 + 3) / 3, "b": (2 + 1.5 + 1) / 3, "c": (3 + 3 + 2) / 3}
    )
    assert (ranks.blocks, ranks.left_out) == (3, 0)


def test_a_block_that_one_method_lacks_is_left_out_of_all_ranks() -> None:
    ranks = statistics.mean_ranks({"a": {0: 0.9, 1: 0.1}, "b": {0: 0.8}})
    assert ranks.mean == {"a": 1.0, "b": 2.0}
    assert (ranks.blocks, ranks.left_out) == (1, 1)


def test_methods_without_a_common_block_have_no_ranks() -> None:
    ranks = statistics.mean_ranks({"a": {0: 0.9}, "b": {1: 0.8}})
    assert ranks.blocks == 0
    assert all(math.isnan(rank) for rank in ranks.mean.values())


def test_a_slope_has_the_interval_of_least_squares() -> None:
    # Residuals of the line 1 + 2x: +0.1, -0.2, +0.1; s^2 = 0.06, sum of squares of x = 2; t(1) =
    # 12.706.
    line = statistics.regress([0.0, 1.0, 2.0], [1.1, 2.8, 5.1])
    assert line is not None
    assert (line.slope, line.intercept) == (pytest.approx(2.0), pytest.approx(1.0))
    assert line.half == pytest.approx(12.706 * math.sqrt(0.06 / 2), rel=1e-4)


@pytest.mark.parametrize("x", [[0.0, 1.0], [0.7, 0.7, 0.7]])
def test_no_line_goes_through_two_points_or_a_single_x(x: list[float]) -> None:
    assert statistics.regress(x, x) is None
