"""Queue of MQTT events that is bounded by bytes, not by their number:
a payload may have ten bytes or ten megabytes.
"""

import queue
from typing import Any

from broker_config.mqtt.client import Delivery

EVENT_OVERHEAD = 1024  # bytes that an event takes besides its payload, at most


class EventQueue(queue.Queue[Any]):
    """Queue that is full once the events in it take `max_bytes`; its qsize() is in bytes, too."""

    def __init__(self, max_bytes: int):
        super().__init__(max_bytes)

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self._bytes = 0

    def _qsize(self) -> int:
        return self._bytes

    def _put(self, item: Any) -> None:
        super()._put(item)
        self._bytes += _size(item)

    def _get(self) -> Any:
        item = super()._get()
        self._bytes -= _size(item)
        return item


def _size(event: object) -> int:
    payload = len(event.payload) if isinstance(event, Delivery) else 0
    return EVENT_OVERHEAD + payload
