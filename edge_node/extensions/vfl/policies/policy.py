"""Interface of policies that decide local iterations, and the timings that they see."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]  # one for each sensor
SHORTEST = 1e-6  # s, less than which no measured timing counts


class Timing(NamedTuple):
    """What is known of a round before its local iterations (paper eqs. 10, 11, 13), each [K]."""

    collection: Seconds
    communication: Seconds
    iteration: Seconds  # one local iteration: C W_lc / f

    def latency(self, iterations: NDArray[np.int64]) -> float:
        """The round's latency in seconds (eq. 14)."""
        return float((self.collection + self.communication + iterations * self.iteration).max())


class Policy(Protocol):
    """Chooses E_{t,k} in [1, E_max] for every sensor, whether timings are measured or simulated."""

    def __call__(self, timing: Timing, round_: int) -> NDArray[np.int64]:
        """Local iterations [K] of round 1, 2, ..."""
        ...
