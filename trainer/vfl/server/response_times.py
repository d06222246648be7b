"""Response times of sensors: absence, lateness, duration of each part of a round. Pure, without clock."""

from collections.abc import Collection, Sequence
from math import inf

from trainer.vfl.server.round_state import ReportedTimes

_AGAIN = 1.0  # seconds without an answer after which sensors are asked again, then twice as many
_LONGEST = 30.0
_DRIPS = 10.0  # times the patience, after which a sensor is late even though more and more of its rows come


class ResponseTimes:
    """Response times of one head process's sensors, in seconds of any monotonic clock."""

    def __init__(self, sensors: Sequence[str], patience: float, now: float):
        self.absent: set[str] = set()  # that rounds no longer wait for
        self.costs: dict[str, tuple[float, float, float]] = {}  # collection, communication, iteration
        self.closed = now  # when a round last was
        self._sensors, self._patience = sensors, patience
        self._last: dict[str, float] = {}  # when a sensor's embeddings last came in the open round
        self._recent: dict[int, float] = {}  # when the rounds of this attempt opened, for as long as `patience`
        self._opened = self._asked = now
        self._silence = _AGAIN
        self._taken: tuple[int, ...] = ()  # local iterations of the round before

    def start_attempt(self, absent: Collection[str]) -> None:
        """A new attempt, without these sensors."""
        self.absent = set(absent)
        self._recent.clear()

    def open_round(self, round_: int, now: float) -> None:
        """A round opens."""
        self._opened = self._asked = self._recent[round_] = now
        self._silence = _AGAIN
        self._last.clear()
        while now - self._recent[oldest := next(iter(self._recent))] > self._patience:
            del self._recent[oldest]

    def record(self, sensor: str, round_: int, now: float, *, news: bool, ended: bool) -> None:
        """Embeddings of a round have come: something new of the open one, or the end of a sensor's part of any."""
        if ended and now - self._recent.get(round_, -inf) < self._patience:
            self.absent.discard(sensor)  # so fast that it is worth waiting for, even if its round is over
        if news:
            self._last[sensor] = now

    def measure(self, sensor: str, reported: ReportedTimes, now: float) -> float:
        """A sensor's part of the open round is whole; returns what it took.

        A round opens while sensors still train in the one before it: that is no time of the network's.
        """
        latency = now - self._opened
        steps = self._taken[self._sensors.index(sensor)] if self._taken else 0
        costs = reported.clipped(latency, (now - self.closed) / steps if steps else self._patience)
        communication = max(0.0, latency - steps * costs.iteration - costs.collection - costs.embedding)
        self.costs[sensor] = costs.collection, communication, costs.iteration
        return latency

    def find_late(self, missing: Sequence[str], now: float) -> list[str]:
        """Find the sensors that have sent nothing new for too long, or have not finished in a very long time."""
        drips = now - self._opened > _DRIPS * self._patience
        return [each for each in missing if drips or now - self._last.get(each, self._opened) > self._patience]

    def is_time_to_ask(self, now: float) -> bool:
        """Whether it is time to ask again those that have not answered; each time after a longer wait."""
        if now - max([self._asked, *self._last.values()]) <= self._silence:
            return False
        self._asked, self._silence = now, min(_LONGEST, 2 * self._silence)
        return True

    def close_round(self, iterations: tuple[int, ...], now: float) -> float:
        """The open round is closed, and sensors take so many local iterations; returns seconds since the one before."""
        before, self.closed, self._taken = self.closed, now, iterations
        return now - before
