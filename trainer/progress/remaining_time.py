"""Estimate of the time that the remaining rounds will take, from those already closed."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

Clock = Callable[[], float]
_WINDOW = 20  # rounds
_WARM_UP = 30.0  # seconds: a first round shorter than this may say little about the others


class RemainingTime:
    """Remaining time of `rounds` rounds.

    It counts down within a round, and one slow round does not make it jump.
    """

    def __init__(self, rounds: int = 0, clock: Clock = time.monotonic):
        self.rounds = rounds
        self.closed = 0  # number of the newest closed round
        self._clock = clock
        self._first = 0.0  # seconds; only used until there is a second round
        self._later: deque[float] = deque(maxlen=_WINDOW)
        self._since = clock()

    def close_round(self, round_: int, seconds: float) -> None:
        """Record that a round is closed, and how long it took."""
        if self.closed:
            self._later.append(seconds)
        else:
            self._first = seconds
        self.closed = round_
        self._since = self._clock()

    @property
    def seconds(self) -> float | None:
        """The estimate; None while there is nothing to base it on, and when no round is left."""
        if not self.closed < self.rounds or not (self._later or self._first > _WARM_UP):
            return None
        typical = median(self._later or [self._first])
        return (self.rounds - self.closed) * typical - min(self._clock() - self._since, typical)
