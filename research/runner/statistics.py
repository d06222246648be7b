"""Statistics over seeds: means, paired differences, ranks, a regression;
comparisons use the seeds that all have.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

B = TypeVar("B", bound=Hashable)  # seed, or a block of setting and seed


class Spread(NamedTuple):
    """Mean and standard deviation (ddof = 1; NaN for a single value)."""

    mean: float
    deviation: float
    size: int


class Difference(NamedTuple):
    """Mean of paired differences; the 95 % interval is mean ± half (NaN for a single pair)."""

    mean: float
    half: float
    pairs: int
    left_out: int  # seeds or blocks that only one side has


class Ranks(NamedTuple):
    """Mean rank by name, 1 = highest value, ties share their mean;
    over the blocks that all names have.
    """

    mean: dict[str, float]
    blocks: int
    left_out: int  # blocks that some name lacks


class Regression(NamedTuple):
    """Least-squares line y = intercept + slope * x; the slope's 95 % interval is slope ± half."""

    slope: float
    intercept: float
    half: float


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    values = np.fromiter(values, float)
    return Spread(
        float(values.mean()),
        float(values.std(ddof=1)) if len(values) > 1 else math.nan,
        len(values),
    )


def paired_difference(first: Mapping[B, float], second: Mapping[B, float]) -> Difference | None:
    """`first` minus `second`, seed by seed or block by block (Student's t);
    None if they have none in common.
    """
    common = sorted(first.keys() & second.keys(), key=str)
    if not common:
        return None
    mean, deviation, count = spread(first[seed] - second[seed] for seed in common)
    half = _t_quantile(count - 1) * deviation / math.sqrt(count) if count > 1 else math.nan
    return Difference(mean, half, count, len(first.keys() ^ second.keys()))


def mean_ranks(values: Mapping[str, Mapping[B, float]]) -> Ranks:
    """Of names over blocks (a setting and a seed); `values` is by name, then by block."""
    blocks = [set(each) for each in values.values()]
    common = list(set[B]().union(*blocks).intersection(*blocks))
    table = np.array([[each[block] for block in common] for each in values.values()]).reshape(
        len(values), -1
    )
    ranks = stats.rankdata(-table, axis=0).mean(axis=1) if common else [math.nan] * len(values)
    left_out = len(set[B]().union(*blocks)) - len(common)
    return Ranks(dict(zip(values, map(float, ranks), strict=True)), len(common), left_out)


def regress(x: Sequence[float], y: Sequence[float]) -> Regression | None:
    """Through points that are taken as independent; None if there are fewer than three,
    or x does not vary.
    """
    if len(x) < 3 or min(x) == max(x):
        return None
    fit = stats.linregress(x, y)
    return Regression(
        float(fit.slope), float(fit.intercept), _t_quantile(len(x) - 2) * float(fit.stderr)
    )


def _t_quantile(freedom: int) -> float:
    """Half width of Student's 95 % interval, in standard errors."""
    return float(stats.t.ppf(0.975, freedom))
