"""How long the rounds that are left will take, judged by those that are closed."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

Clock = Callable[[], float]
_REMEMBERED = 20  # rounds
_WARM_UP = 30.0  # seconds: a first round that was shorter may say little about the others


class Pace:
    """The time left of `rounds` rounds. It counts down within a round, and does not jump when one took long."""

    def __init__(self, rounds: int = 0, clock: Clock = time.monotonic):
        self.rounds = rounds
        self.closed = 0  # number of the newest closed round
        self._clock = clock
        self._first = 0.0  # seconds; counts only while it is alone
        self._later: deque[float] = deque(maxlen=_REMEMBERED)
        self._since = clock()

    def close(self, round_: int, seconds: float) -> None:
        """A round is closed that took so long."""
        if self.closed:
            self._later.append(seconds)
        else:
            self._first = seconds
        self.closed, self._since = round_, self._clock()

    @property
    def left(self) -> float | None:
        """Seconds; None while nothing is known, and when no round is left."""
        if not self.closed < self.rounds or not (self._later or self._first > _WARM_UP):
            return None
        typical = median(self._later or [self._first])
        return (self.rounds - self.closed) * typical - min(self._clock() - self._since, typical)
