"""The latency of a round (paper, eqs. 10 to 14), its disparity (eq. 15) and reward (eq. 19)."""

from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trainer.seeding import generator

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class LatencySettings(Struct, frozen=True, kw_only=True):
    """The constants of paper VII-D. Which sensors are slow is our choice: every other one,
    the last among them.
    """

    mu0: float = 2.0  # s, before the first sensor collects
    mu: tuple[float, float] = (2.0, 4.0)  # s from sensor to sensor: one value a round for all
    embedding: float = 1e5  # W_fe, weights that are sent
    bandwidth: float = 1e7  # B, Hz, shared equally
    power: float = 1.0  # p, W
    noise: float = 5e-2  # sigma^2, W
    gain: tuple[float, float] = (1e-5, 1e-4)  # g, of each sensor and round
    cycles: float = 1000.0  # C, of a processor for one weight
    weights: float = 5e5  # W_lc, of the local model
    fast: tuple[float, float] = (2e7, 4e7)  # f, cycles a second, of each sensor and round
    slow: tuple[float, float] = (1e7, 3e7)


class TimingSource(Protocol):
    """Source of timings: as the paper simulates them, or as a head has measured them."""

    @property
    def sensors(self) -> int:
        """K."""
        ...

    @property
    def ranges(self) -> Floats:
        """[2, 3, K]: least and greatest collection, communication and iteration in seconds."""
        ...

    def sample(self, rounds: int, seed: int, episode: int) -> Floats:
        """Timings [T, 3, K] in seconds: a function of (seed, episode), whoever asks."""
        ...


class SimulatedTimings:
    """Timings that are drawn anew in each round, as paper VII-D has them."""

    def __init__(self, sensors: int, setting: LatencySettings | None = None):
        self.sensors = sensors
        self.setting = setting or LatencySettings()
        slow = np.arange(sensors) % 2 == 1
        # [2, K]
        self._frequency = np.where(
            slow, np.array([self.setting.slow]).T, np.array([self.setting.fast]).T
        )

    def sample(self, rounds: int, seed: int, episode: int) -> Floats:
        """Timings [T, 3, K]."""
        random = generator(seed, "timings", episode)
        setting = self.setting
        shape = (rounds, self.sensors)
        low, high = self._frequency
        return np.stack(
            [
                collection(setting, random.uniform(*setting.mu, (rounds, 1)), self.sensors),
                communication(setting, random.uniform(*setting.gain, shape), self.sensors),
                iteration(setting, random.uniform(low, high, shape)),
            ],
            axis=1,
        )

    @property
    def ranges(self) -> Floats:
        """By the ends of what is drawn."""
        setting = self.setting
        ones = np.ones(self.sensors)
        ends = [
            [
                collection(setting, np.full(1, mu), self.sensors),
                communication(setting, gain * ones, self.sensors),
                iteration(setting, frequency),
            ]
            for mu, gain, frequency in zip(
                setting.mu, setting.gain[::-1], self._frequency[::-1], strict=True
            )
        ]
        return np.array(ends)


def collection(setting: LatencySettings, mu: Floats, sensors: int) -> Floats:
    """Eq. 10: mu k + mu0 of sensors 1 to K, with `mu` [..., 1]."""
    return mu * np.arange(1, sensors + 1) + setting.mu0


def communication(setting: LatencySettings, gain: Floats, sensors: int) -> Floats:
    """Eqs. 11 and 12: W_fe / r, with r = B / K log2(1 + g p / sigma^2)."""
    rate = setting.bandwidth / sensors * np.log2(1 + gain * setting.power / setting.noise)
    return np.asarray(setting.embedding / rate)


def iteration(setting: LatencySettings, frequency: Floats) -> Floats:
    """Eq. 13 with E = 1: C W_lc / f."""
    return setting.cycles * setting.weights / frequency


def disparity(iterations: Ints) -> Floats:
    """Eq. 15: sum of |E_k - mean E|, over the last axis."""
    return np.asarray(np.abs(iterations - iterations.mean(-1, keepdims=True)).sum(-1))


def latencies(timings: Floats, iterations: Ints) -> Floats:
    """Eq. 14 of many rounds: timings [T, 3, K], iterations [T, K] or [K] -> [T]."""
    return np.asarray((timings[:, 0] + timings[:, 1] + iterations * timings[:, 2]).max(-1))


class Weights(Struct, frozen=True):
    """alpha1 to alpha3 of eq. 19."""

    accuracy: float
    latency: float  # 1/s
    disparity: float

    def reward(self, accuracy: float, latency: float, disparity: float) -> float:
        """R_t."""
        return self.accuracy * accuracy - self.cost(latency, disparity)

    def cost(self, latency: float, disparity: float) -> float:
        """The penalty in R_t for latency and disparity."""
        return self.latency * latency + self.disparity * disparity
