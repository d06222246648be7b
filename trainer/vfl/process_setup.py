"""What the process of a head or a sensor needs to take part in many rounds a second, whoever sends what."""

import gc
import queue
import sys
from typing import Any

import torch

from broker_config.mqtt.client import Delivery

_MOST = 1 << 27  # bytes
_EVENT = 1024  # that anything takes besides its payload
_SWITCH = 5e-4  # seconds that Python's other thread may keep the network waiting


def prepare(threads: int) -> None:
    """Set this process up."""
    torch.set_num_threads(threads)
    sys.setswitchinterval(_SWITCH)
    gc.freeze()  # else every collection goes through all of torch, in the middle of a round


class Inbox(queue.Queue[Any]):
    """Events of a Link that wait. It is full at `most` bytes, which its size is counted in."""

    def __init__(self, most: int = _MOST):
        super().__init__(most)

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self._bytes = 0

    def _qsize(self) -> int:
        return self._bytes

    def _put(self, item: Any) -> None:
        super()._put(item)
        self._bytes += _weight(item)

    def _get(self) -> Any:
        item = super()._get()
        self._bytes -= _weight(item)
        return item


def _weight(item: object) -> int:
    return _EVENT + (len(item.payload) if isinstance(item, Delivery) else 0)
