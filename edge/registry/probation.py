"""Probation: a new model's first time in service,
during which it must not do worse than its predecessor.
"""

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from edge.inference.pipeline import Inspection
from edge.registry.pre_rollout_checks import Gate

_WINDOW = 500  # last verdicts
_ENOUGH = 30  # verdicts for a meaningful share
_DAY = 24 * 3600.0  # seconds


class DoubtfulShare:
    """Share of doubted verdicts among the last ones."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=_WINDOW)

    def count(self, inspection: Inspection) -> None:
        """Count a verdict."""
        self._last.append(bool(inspection.verdict.doubts))

    @property
    def value(self) -> float | None:
        """0..1; None while there are too few verdicts."""
        return sum(self._last) / len(self._last) if len(self._last) >= _ENOUGH else None


class Probation:
    """Observes a model that was just activated: the limits of `Gate` that apply in service,
    and for how long.
    """

    def __init__(
        self, gate: Gate, before: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`before` is the predecessor's share of doubted verdicts, if it is known."""
        self.doubtful = DoubtfulShare()
        self._gate = gate
        self.before = before
        self._clock = clock
        self._begun = clock()
        self._frames = 0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)  # for one image, of the last frames

    def count(self, inspection: Inspection) -> str:
        """Count a verdict; the reason why the model must be replaced, or an empty string."""
        self._frames += 1
        self.doubtful.count(inspection)
        self._seconds.append(inspection.inference_seconds / len(inspection.tiled.pixels))
        return self._explain_latency() or self._explain_doubts()

    @property
    def is_passed(self) -> bool:
        """Whether the probation has lasted long enough."""
        lasted = self._clock() - self._begun
        return lasted >= _DAY or (
            lasted >= 60 * self._gate.minutes and self._frames >= self._gate.frames
        )

    def _explain_latency(self) -> str:
        if self._gate.latency is None or len(self._seconds) < _ENOUGH:
            return ""
        if (found := float(np.percentile(self._seconds, 95))) <= self._gate.latency:
            return ""
        allowed = f"[gate] latency allows {1000 * self._gate.latency:g} ms"
        return f"one of 20 images takes it {1000 * found:.1f} ms or more; {allowed}"

    def _explain_doubts(self) -> str:
        found = self.doubtful.value
        if found is None or self.before is None or found - self.before <= self._gate.doubts:
            return ""
        return f"{found:.0%} of its verdicts are in doubt, of the model before {self.before:.0%}"
