"""Surrogate learning curve: accuracy as a function of the decisions so far, while an agent learns.

A round's decision adds progress: a weighted mean of the least, the mean and the most iterations of
the sensors. Accuracy is a rising function of the progress so far, linear between knots.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_node.extensions.vfl.policies.latency import Floats, Ints

_TENTHS = 10


class Curve(Struct, frozen=True):
    """Accuracy in [0, 1] by progress, which is in iterations that all sensors take."""

    # of the least, the mean and the most iterations of a round in its progress
    shares: tuple[float, float, float]
    progress: tuple[float, ...]  # knots, rising from 0
    accuracy: tuple[float, ...]  # at the knots

    def step(self, iterations: Ints) -> Floats:
        """Progress of rounds [..., K] -> [...]."""
        return np.asarray(_steps(iterations) @ np.array(self.shares))

    def __call__(self, progress: Floats | float) -> Floats:
        """Accuracy after so much progress; beyond the last knot it stays."""
        return np.asarray(np.interp(progress, self.progress, self.accuracy))


class Run(NamedTuple):
    """Decisions of a real run, and the accuracy that it reached."""

    iterations: Ints  # [T, K]
    accuracy: Floats  # [T], on validation data, after each round


def fit(runs: Sequence[Run], knots: int = 14) -> tuple[Curve, float]:
    """The curve of least squared error over all rounds of all runs,
    and its root mean squared error.
    """
    steps = [np.cumsum(_steps(run.iterations), axis=0) for run in runs]
    reached = np.concatenate([run.accuracy for run in runs])
    found = [
        _monotone(np.concatenate(steps) @ shares, reached, shares, knots) for shares in _simplex()
    ]
    curve, error = min(found, key=lambda each: each[1])
    return curve, error


def _steps(iterations: Ints) -> Floats:
    return np.stack([iterations.min(-1), iterations.mean(-1), iterations.max(-1)], axis=-1).astype(
        float
    )


def _simplex() -> list[Floats]:
    tenths = product(range(_TENTHS + 1), repeat=2)
    return [np.array([a, b, _TENTHS - a - b]) / _TENTHS for a, b in tenths if a + b <= _TENTHS]


def _monotone(
    progress: Floats, accuracy: Floats, shares: Floats, knots: int
) -> tuple[Curve, float]:
    from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - slow to import, and only a fit needs it

    places = np.append(0.0, np.geomspace(progress.min(), progress.max(), knots - 1))
    smooth: NDArray[np.float64] = (
        IsotonicRegression(out_of_bounds="clip").fit(progress, accuracy).predict(places)
    )
    curve = Curve(
        (float(shares[0]), float(shares[1]), float(shares[2])),
        tuple(map(float, places.round(1))),
        tuple(map(float, smooth.round(4))),
    )
    return curve, float(np.sqrt(np.mean((curve(progress) - accuracy) ** 2)))


# C-MAPSS FD002, 2 sensors, accuracy = 1 - RMSE / 130: python -m research.studies.vfl_curve --data
# cmapss=FOLDER. One step an iteration, 100 rounds of 11 federations: what counts is the most
# iterations, which the head takes too.
FD002 = Curve(
    (0.0, 0.0, 1.0),
    (0.0, 1.0, 1.8, 3.2, 5.6, 10.0, 17.8, 31.6, 56.2, 100.0, 177.8, 316.2, 562.3, 1000.0),
    (
        0.6316,
        0.6316,
        0.6316,
        0.6316,
        0.632,
        0.6332,
        0.7085,
        0.7452,
        0.7516,
        0.7647,
        0.815,
        0.8185,
        0.8185,
        0.8185,
    ),
)
# 32 steps an iteration, 200 rounds, as fitted earlier: to federations without noise whose set was
# the newest 2,000.
FD002_MINIBATCH = Curve(
    (0.0, 0.5, 0.5),
    (0.0, 1.0, 1.9, 3.5, 6.7, 12.6, 23.7, 44.7, 84.3, 158.7, 299.1, 563.5, 1061.6, 2000.0),
    (
        0.6392,
        0.6392,
        0.6393,
        0.6396,
        0.6407,
        0.6951,
        0.7345,
        0.7361,
        0.7425,
        0.7993,
        0.813,
        0.813,
        0.813,
        0.8208,
    ),
)
# CIFAR-10, 4 sensors, accuracy: python -m research.studies.vfl_curve --data cifar10=FILE. 50 rounds
# of 27 federations, from which it is 0.038 away: decisions matter less there than seeds.
CIFAR_10 = Curve(
    (0.6, 0.0, 0.4),
    (0.0, 1.0, 1.6, 2.5, 4.0, 6.3, 10.0, 15.8, 25.0, 39.7, 62.9, 99.6, 157.8, 250.0),
    (
        0.0987,
        0.0987,
        0.1012,
        0.1021,
        0.106,
        0.1132,
        0.1202,
        0.1562,
        0.1833,
        0.22,
        0.2412,
        0.2439,
        0.2439,
        0.2439,
    ),
)
