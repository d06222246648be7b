"""The best decisions where the learning curve and the distribution of timings are known:
a bound for every rule.

Timings are drawn anew in each round, so a round's state is the progress so far: backward dynamic
programming finds the greatest expected sum of rewards. For each timing only the cheapest decision
of every amount of progress counts.
"""

from itertools import product

import numpy as np

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.policies.latency import (
    Floats,
    Ints,
    TimingSource,
    Weights,
    disparity,
    latencies,
)
from edge_node.extensions.vfl.policies.policy import Timing
from research.dao_vfl.policies.learning_curve import Curve

_MOST = 20_000  # decisions that are enumerated
_TIMINGS, _GRID = 128, 400  # timings that stand for the distribution; points of progress


class Optimum:
    """`best`: the sum of rewards of all rounds; `myopic`: of each round by itself
    (`foresight` False).
    """

    def __init__(
        self,
        iterations: int,
        curve: Curve,
        weights: Weights,
        source: TimingSource,
        rounds: int,
        foresight: bool = True,
    ):
        if iterations**source.sensors > _MOST:
            raise UsageError(
                f"{iterations} iterations of {source.sensors} sensors are too many decisions to "
                "try them all",
                f"take fewer of either: {_MOST} decisions at most",
            )
        self._curve, self._weights = curve, weights
        self._decisions = np.array(
            list(product(range(1, iterations + 1), repeat=source.sensors)), np.int64
        )
        self._steps, self._uneven = curve.step(self._decisions), disparity(self._decisions)
        self._amounts, self._place = np.unique(self._steps.round(1), return_inverse=True)
        self._grid = np.linspace(0, iterations * rounds, _GRID)
        self._later = np.zeros((rounds + 1, _GRID))  # value of progress after round t
        if foresight:
            self._plan(source.sample(_TIMINGS, 0, -1))
        self._progress = 0.0

    def __call__(self, timing: Timing, round_: int) -> Ints:
        """Decide; round 1 begins anew."""
        if round_ == 1:
            self._progress = 0.0
        value = self._value(
            self._progress + self._steps, min(round_, len(self._later) - 1)
        ) - self._cost(timing)
        chosen = int(value.argmax())
        self._progress += float(self._steps[chosen])
        return np.asarray(self._decisions[chosen])

    def _plan(self, timings: Floats) -> None:
        cheapest = np.full((len(timings), len(self._amounts)), np.inf)
        for row, table in zip(cheapest, timings, strict=True):
            np.minimum.at(row, self._place.ravel(), self._cost(Timing(*table)))
        for round_ in range(len(self._later) - 1, 0, -1):
            value = self._value(self._grid[:, None] + self._amounts, round_)  # [grid, amounts]
            self._later[round_ - 1] = np.stack([(value - row).max(1) for row in cheapest]).mean(0)

    def _value(self, progress: Floats, round_: int) -> Floats:
        """Of having so much progress after a round."""
        later = np.interp(progress, self._grid, self._later[round_])
        return np.asarray(self._weights.accuracy * self._curve(progress) + later)

    def _cost(self, timing: Timing) -> Floats:
        latency = latencies(np.stack(timing)[None], self._decisions)
        return np.asarray(self._weights.latency * latency + self._weights.disparity * self._uneven)
