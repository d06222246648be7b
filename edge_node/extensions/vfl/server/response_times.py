"""Response times of sensors: duration of each part of a round. Pure, without clock."""

from collections.abc import Sequence
from math import inf

from edge_node.extensions.vfl.server.round_state import ReportedTimes


class ResponseTimes:
    """Response times of one head process's sensors, in seconds of any monotonic clock."""

    def __init__(self, sensors: Sequence[str], patience: float, now: float):
        # collection, communication, iteration
        self.costs: dict[str, tuple[float, float, float]] = {}
        self._sensors = sensors
        self._patience = patience
        # when the rounds of this attempt opened, for as long as `patience`
        self._recent: dict[int, float] = {}
        self._opened = self._closed = now  # when a round last was
        self._taken: tuple[int, ...] = ()  # local iterations of the round before

    def start_attempt(self) -> None:
        """The rounds of the attempt before are void."""
        self._recent.clear()

    def open_round(self, round_: int, now: float) -> None:
        """A round opens."""
        self._opened = self._recent[round_] = now
        while now - self._recent[oldest := next(iter(self._recent))] > self._patience:
            del self._recent[oldest]

    def is_recent(self, round_: int, now: float) -> bool:
        """Whether a round of this attempt has opened within the patience."""
        return now - self._recent.get(round_, -inf) < self._patience

    def measure(self, sensor: str, reported: ReportedTimes, now: float) -> float:
        """A sensor's part of the open round is whole; returns what it took.

        A round opens while sensors still train in the one before it: that is no time of the
        network's.
        """
        latency = now - self._opened
        steps = self._taken[self._sensors.index(sensor)] if self._taken else 0
        per_step = (now - self._closed) / steps if steps else self._patience
        costs = reported.clipped(latency, per_step)
        communication = max(
            0.0, latency - steps * costs.iteration - costs.collection - costs.embedding
        )
        self.costs[sensor] = costs.collection, communication, costs.iteration
        return latency

    def close_round(self, iterations: tuple[int, ...], now: float) -> float:
        """The open round is closed, and sensors take so many local iterations;
        returns seconds since the one before.
        """
        before = self._closed
        self._closed = now
        self._taken = iterations
        return now - before
