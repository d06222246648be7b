"""Detection of another process that uses our MQTT client id: a broker keeps only one of the two connected."""

import time
from collections.abc import Callable

from broker_config.mqtt.client import TAKEN_OVER, Connected, Disconnected
from broker_config.protocol.errors import EdgeNodeError

_SHORT = 3.0  # seconds
_REPEATED = 4  # connections as short as that, one after the other


class CollisionDetector:
    """Recognises from the events of one client that two processes take its connection from each other.

    MQTT 5 has the broker say so as it closes the connection. mosquitto 2.0.11 does not: there, each connection breaks
    again soon after it was made.
    """

    def __init__(
        self, name: str, *, remedy: str = "stop one of them", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._remedy, self._clock = name, remedy, clock
        self._connected_at, self._short = 0.0, 0

    def observe(self, event: Connected | Disconnected) -> None:
        """Raise EdgeNodeError if this event shows that another process has connected under our client id."""
        if isinstance(event, Connected):
            self._connected_at = self._clock()
            return
        self._short = self._short + 1 if self._clock() - self._connected_at < _SHORT else 0
        if event.reason == TAKEN_OVER or self._short == _REPEATED:
            raise EdgeNodeError(f"another process has connected as {self._name}", self._remedy)
