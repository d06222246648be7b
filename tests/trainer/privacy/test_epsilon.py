"""The accountant of Gaussian noise: exact, and as others count."""

from math import erf, inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.privacy.epsilon import allowed_distance, noise_delta, spent_epsilon


@pytest.mark.parametrize("distance", [0.05, 0.5, 1.0, 3.0, 10.0])
def test_at_epsilon_zero_delta_is_the_total_variation(distance: float) -> None:
    assert noise_delta(distance, 0) == pytest.approx(erf(distance / 2 / sqrt(2)), rel=1e-9)


@pytest.mark.parametrize(
    ("distance", "epsilon"), [(0.1, 0.2), (1.0, 1.0), (1.0, 4.0), (4.0, 9.0), (12.0, 80.0)]
)
def test_delta_is_the_integral_of_what_one_density_has_more_than_the_others(
    distance: float, epsilon: float
) -> None:
    x, width = np.linspace(-40, 60, 2_000_001, retstep=True)
    log_p, log_q = -(x**2) / 2, -((x - distance) ** 2) / 2
    excess = np.maximum(0, np.exp(log_q) - np.exp(epsilon + log_p)) / sqrt(2 * np.pi)
    assert noise_delta(distance, epsilon) == pytest.approx(excess.sum() * width, rel=1e-5)


@pytest.mark.parametrize(
    ("releases", "epsilon"),
    [
        ([(1, 1)], 4.3772),
        ([(60, 2 / 10)], 7.3294),
        ([(20, 2 / 3)], 16.5420),
        ([(72, 1 / 8), (2, 1 / 2)], 5.8124),
    ],
)
def test_epsilon_is_what_another_accountant_says(
    releases: list[tuple[int, float]], epsilon: float
) -> None:
    """Google's dp-accounting 0.6.0 (PLDAccountant) at delta 1e-5,
    of so many releases of a distance each.

    Opacus 1.6.0 says 7.340 of the second by its PRV accountant, and 7.884 by Renyi's bound.
    """
    distance = sqrt(sum(times * each**2 for times, each in releases))
    assert spent_epsilon(distance, 1e-5) == pytest.approx(epsilon, abs=1e-4)


def test_nothing_released_costs_nothing_and_without_noise_everything_is_told() -> None:
    assert spent_epsilon(0.0) == 0.0
    assert spent_epsilon(inf) == inf


@given(st.floats(0.01, 200), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_an_epsilon_allows_the_distance_that_spends_it(epsilon: float, delta: float) -> None:
    distance = allowed_distance(epsilon, delta)
    assert spent_epsilon(distance, delta) == pytest.approx(epsilon, rel=1e-5)
    assert spent_epsilon(distance * 1.001, delta) > epsilon
