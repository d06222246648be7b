"""How accuracy grows with the decisions: the surrogate that stands for a real line while an agent learns.

A round's decision adds progress: a weighted mean of the least, the mean and the most iterations of the sensors.
Accuracy is a rising function of the progress so far, linear between knots.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trainer.vertical.adaptive.latency import Floats, Ints

_TENTHS = 10


class Curve(Struct, frozen=True):
    """Accuracy in [0, 1] by progress, which is in iterations that all sensors take."""

    shares: tuple[float, float, float]  # of the least, the mean and the most iterations of a round in its progress
    progress: tuple[float, ...]  # knots, rising from 0
    accuracy: tuple[float, ...]  # at the knots

    def step(self, iterations: Ints) -> Floats:
        """Progress of rounds [..., K] -> [...]."""
        return np.asarray(_steps(iterations) @ np.array(self.shares))

    def __call__(self, progress: Floats | float) -> Floats:
        """Accuracy after so much progress; beyond the last knot it stays."""
        return np.asarray(np.interp(progress, self.progress, self.accuracy))


class Run(NamedTuple):
    """What a real line did and reached."""

    iterations: Ints  # [T, K]
    accuracy: Floats  # [T], on validation data, after each round


def fit(runs: Sequence[Run], knots: int = 12) -> tuple[Curve, float]:
    """The curve of least squared error over all rounds of all runs, and its root mean squared error."""
    steps = [np.cumsum(_steps(run.iterations), axis=0) for run in runs]
    reached = np.concatenate([run.accuracy for run in runs])
    found = [_monotone(np.concatenate(steps) @ shares, reached, shares, knots) for shares in _simplex()]
    curve, error = min(found, key=lambda each: each[1])
    return curve, error


def _steps(iterations: Ints) -> Floats:
    return np.stack([iterations.min(-1), iterations.mean(-1), iterations.max(-1)], axis=-1).astype(float)


def _simplex() -> list[Floats]:
    tenths = product(range(_TENTHS + 1), repeat=2)
    return [np.array([a, b, _TENTHS - a - b]) / _TENTHS for a, b in tenths if a + b <= _TENTHS]


def _monotone(progress: Floats, accuracy: Floats, shares: Floats, knots: int) -> tuple[Curve, float]:
    from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - slow to import, and only a fit needs it

    places = np.quantile(progress, np.linspace(0, 1, knots))
    smooth: NDArray[np.float64] = IsotonicRegression().fit(progress, accuracy).predict(places)
    places[0] = 0.0
    curve = Curve(
        (float(shares[0]), float(shares[1]), float(shares[2])),
        tuple(map(float, places.round(1))),
        tuple(map(float, smooth.round(4))),
    )
    return curve, float(np.sqrt(np.mean((curve(progress) - accuracy) ** 2)))


FD002 = Curve((0.0, 1.0, 0.0), (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0), (0.639, 0.64, 0.685, 0.739, 0.742, 0.76, 0.81, 0.82, 0.823, 0.825))  # fmt: skip # noqa: E501
