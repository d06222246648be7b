"""Published status of a vertical federation: state of each sensor, last loss, rounds per second."""

import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from broker_config.protocol.messages import Stage
from broker_config.protocol.vfl_messages import SensorState, VflOverview, VflSpec
from trainer.vfl.server.journal import ClosedRound

_EVERY = 1.0  # seconds between two overviews, at least


class StatusTracker:
    """Collects what one head process knows, and makes an overview of it once a second."""

    def __init__(self, spec: VflSpec):
        self.latency: dict[str, float] = {}  # of each sensor, seconds
        self._spec = spec
        self._newest: ClosedRound | None = None
        self._closed, self._since = 0, time.monotonic()  # rounds closed since the last overview

    def record_round(self, closed: ClosedRound) -> None:
        """Record a closed round."""
        self._newest, self._closed = closed, self._closed + 1

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
        anyway: bool,
        lacks: Mapping[str, str] = {},
    ) -> VflOverview | None:
        """An overview of the sensors; None if the last one is less than a second old, unless one is wanted `anyway`.

        `lacks` says in words what a sensor waits for.
        """
        elapsed = time.monotonic() - self._since
        if elapsed < _EVERY and not anyway:
            return None
        newest, rate = self._newest, self._closed / max(elapsed, 1e-3)
        self._closed, self._since = 0, time.monotonic()
        iterations = dict(zip(self._spec.sensors, newest.iterations, strict=True)) if newest else {}
        return VflOverview(
            run=self._spec.run,
            time=datetime.now(UTC),
            round=round_,
            status=status,
            paused=paused,
            loss=self.loss,
            rate=rate,
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
