"""The problem that a policy solves (paper, P1): timings, effects of decisions, reward."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_node.extensions.vfl.policies.iteration_rules import (
    DISPARITY_COST,
    largest_disparity,
    ones,
)
from edge_node.extensions.vfl.policies.latency import (
    Floats,
    SimulatedTimings,
    TimingSource,
    Weights,
    latencies,
)
from research.dao_vfl.policies.learners import Learner, Surrogate
from research.dao_vfl.policies.learning_curve import Curve

_SAMPLE = 2000  # rounds from which mean latencies are taken


class Game(NamedTuple):
    """P1: T rounds, E_{t,k} in [1, E_max]."""

    source: TimingSource
    iterations: int  # E_max
    rounds: int  # T
    weights: Weights
    learner: Callable[[], Learner]  # of a new federation

    def state(self, timings: Floats, round_: int) -> NDArray[np.float32]:
        """Eq. 17, float32 [3 K + 1], each in [0, 1]: collection, communication, frequency
        (1/s of iterations), t.
        """
        low, high = bounds(self.source)
        known = np.stack([timings[0], timings[1], 1 / timings[2]])
        scaled = (known - low) / np.maximum(high - low, 1e-12)
        clock = (round_ - 1) % self.rounds / self.rounds
        return np.asarray(np.clip(np.append(scaled.ravel(), clock), 0, 1), np.float32)


def bounds(source: TimingSource) -> Floats:
    """[2, 3, K]: least and greatest of what stands in a state."""
    low, high = source.ranges
    return np.stack([[low[0], low[1], 1 / high[2]], [high[0], high[1], 1 / low[2]]])


def simulated(sensors: int, iterations: int, rounds: int, curve: Curve) -> Game:
    """The paper's simulated timings, a surrogate for the federation."""
    return surrogate(SimulatedTimings(sensors), iterations, rounds, curve)


def surrogate(source: TimingSource, iterations: int, rounds: int, curve: Curve) -> Game:
    """A game with a surrogate for the federation, and balanced weights."""
    weights = balanced(source, iterations, rounds, curve)
    return Game(source, iterations, rounds, weights, lambda: Surrogate(curve))


def balanced(source: TimingSource, iterations: int, rounds: int, curve: Curve) -> Weights:
    """alpha1 to alpha3, which the paper does not state,
    so that no part of a reward drowns the others.

    The mean latency of HO costs 1, the disparity of HE costs UNEVEN; and the accuracy that all
    rounds with E_max gain over all with one iteration is worth the latency that they cost more:
    neither extreme is better than the other.
    """
    sensors, timings = source.sensors, source.sample(_SAMPLE, 0, -1)
    least, full = (
        float(latencies(timings, count * ones(sensors)).mean()) for count in (1, iterations)
    )
    latency = 1 / full
    played = np.arange(1.0, rounds + 1)
    gained = float((curve(iterations * played) - curve(played)).mean())
    worth = latency * (full - least) / gained if gained > 0 else 1.0
    return Weights(worth, latency, DISPARITY_COST / largest_disparity(sensors, iterations))
