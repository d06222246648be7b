"""Published status of a vertical federation: state of each sensor, last loss, rounds per second."""

import time
from collections import deque
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from broker_config.protocol.messages import Stage
from edge_node.extensions.vfl.messages import SensorState, VflOverview, VflSpec
from edge_node.extensions.vfl.server.journal import ClosedRound

_EVERY = 1.0  # seconds between two overviews, at least
_LATELY = 30.0  # seconds, or the last two rounds, that the rate is of


class StatusTracker:
    """Collects what one head process knows, and makes an overview of it once a second."""

    def __init__(self, spec: VflSpec):
        self.latency: dict[str, float] = {}  # of each sensor, seconds
        self._spec = spec
        self._newest: ClosedRound | None = None
        self._closed = deque[float]()  # when rounds were, lately
        self._since = 0.0  # when the last overview was made

    def record_round(self, closed: ClosedRound) -> None:
        """Record a closed round."""
        self._newest = closed
        now = time.monotonic()
        self._closed.append(now)
        while len(self._closed) > 2 and now - self._closed[0] > _LATELY:
            self._closed.popleft()

    @property
    def loss(self) -> float | None:
        """Of the last round that was closed."""
        return self._newest.loss if self._newest else None

    def next_overview(
        self,
        round_: int,
        status: Stage,
        present: Collection[str],
        *,
        paused: bool,
        awaited: str,
        anyway: bool,
        lacks: Mapping[str, str] = {},
    ) -> VflOverview | None:
        """An overview of the sensors; None if the last one is less than a second old,
        unless one is wanted `anyway`.

        `awaited` says in words what rounds wait for, `lacks` what a sensor waits for.
        """
        now = time.monotonic()
        if now - self._since < _EVERY and not anyway:
            return None
        newest = self._newest
        self._since = now
        iterations = dict(zip(self._spec.sensors, newest.iterations, strict=True)) if newest else {}
        validation = newest.validation if newest else None
        return VflOverview(
            run=self._spec.run,
            time=datetime.now(UTC),
            round=round_,
            status=status,
            paused=paused,
            awaited=awaited,
            loss=self.loss,
            validation=validation,
            rate=self._rate(now),
            sensors=tuple(
                SensorState(
                    name=name,
                    present=name in present,
                    latency=self.latency.get(name),
                    iterations=iterations.get(name, 0),
                    lacks=lacks.get(name, ""),
                )
                for name in self._spec.sensors
            ),
        )

    def _rate(self, now: float) -> float:
        """Rounds per second, lately; 0 once none was closed for long."""
        times = self._closed
        lasted = times[-1] - times[0] if times else 0.0
        if not lasted or now - times[-1] > max(_LATELY, 2 * lasted):
            return 0.0
        return (len(times) - 1) / lasted
