"""Another process with our MQTT client id: the broker lets only one of us stay."""

import time
from collections.abc import Callable

from broker_config.mqtt.client import TAKEN_OVER, LinkDown, LinkUp
from broker_config.protocol.errors import EdgeNodeError

_SHORT = 3.0  # seconds
_OFTEN = 4  # connections so short, one after the other


class Rivals:
    """Notices that two processes cut each other off.

    A broker says so as it closes the connection; mosquitto 2.0.11 does not, there it breaks again and again, just made.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self._name, self._clock = name, clock
        self._up, self._short = 0.0, 0

    def heed(self, event: LinkUp | LinkDown) -> None:
        """Raise EdgeNodeError if this shows that another process is there."""
        if isinstance(event, LinkUp):
            self._up = self._clock()
            return
        self._short = self._short + 1 if self._clock() - self._up < _SHORT else 0
        if event.reason == TAKEN_OVER or self._short == _OFTEN:
            raise EdgeNodeError(f"another process has connected as {self._name}", "stop one of them")
