"""Accountant of Gaussian noise: the epsilon of what was released, exactly.

Neighbours differ in one item that is replaced by another. Of one release, the two values that they
lead to lie at most so many standard deviations of its noise apart: its *distance*. Any releases
together, each of which may depend on those before, tell neighbours apart exactly as well as a
single one whose squared distance is the sum of theirs (Dong, Roth and Su, *Gaussian Differential
Privacy*, 2022); and of a single one epsilon and delta are known exactly (Balle and Wang, ICML
2018). So there is no bound here that a cleverer accountant could tighten. It knows no amplification
by sampling: whoever draws batches at random may not claim any here.
"""

from collections.abc import Callable
from math import erfc, exp, inf, isnan, log, log1p, pi, sqrt

# of the guarantee that is reported; below 1 / images of any plant, and the same for all
DELTA = 1e-5


def spent_epsilon(distance: float, delta: float = DELTA) -> float:
    """Epsilon of releases at this delta; infinite without noise, or if the distance is no number.

    Args:
        distance: the root of the sum of their squared distances.
        delta: in 0..1.
    """
    if distance in (0.0, inf):
        return distance
    if isnan(distance):
        return inf
    low = 0.0
    high = 1.0
    while noise_delta(distance, high) > delta:
        low = high
        high = 2 * high
    return _bisect(lambda epsilon: noise_delta(distance, epsilon) > delta, low, high)[1]


def allowed_distance(epsilon: float, delta: float = DELTA) -> float:
    """The largest distance of which releases together spend no more than a positive `epsilon`."""
    low = 0.0
    high = 1.0
    while noise_delta(high, epsilon) <= delta:
        low = high
        high = 2 * high
    return _bisect(lambda distance: noise_delta(distance, epsilon) <= delta, low, high)[0]


def _bisect(is_below: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def noise_delta(distance: float, epsilon: float) -> float:
    """Delta of one Gaussian release at this epsilon,
    for two values so many standard deviations apart.
    """
    first = distance / 2 - epsilon / distance
    second = -distance / 2 - epsilon / distance
    return exp(_log_normal_cdf(first)) - exp(epsilon + _log_normal_cdf(second))


def _log_normal_cdf(x: float) -> float:
    if x > -20:
        return log(erfc(-x / sqrt(2)) / 2)
    # Mills' ratio: to 1e-7
    return -x * x / 2 - log(-x * sqrt(2 * pi)) + log1p(-(x**-2) + 3 * x**-4)
