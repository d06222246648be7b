"""Waiting for what a test expects, however busy the machine is."""

import asyncio
import queue
import time
from collections.abc import Callable
from typing import TypeVar

from trainer.progress import Step

PATIENCE = 200.0  # seconds, after which nothing will come any more; a test has 240
_PAUSE = 0.01  # seconds between two looks

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    *,
    meanwhile: Callable[[], object] = lambda: True,
    said: Callable[[], object] = lambda: "what is waited for does not come",
    seconds: float = PATIENCE,
) -> T:
    """What the condition returns, as soon as it holds.

    AssertionError, with what is `said`, if that takes too long, or when what must be true
    `meanwhile` is so no longer.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert meanwhile(), said()
        assert time.monotonic() < deadline, said()
        time.sleep(_PAUSE)
    return found


async def wait_until_async(condition: Callable[[], object]) -> None:
    """The same, while the event loop goes on."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what is waited for does not come"
        await asyncio.sleep(_PAUSE)


def heard(inbox: queue.Queue[object]) -> object:
    """What a training thread says next, but for how far it is: a busy machine adds that."""
    while isinstance(said := inbox.get(timeout=PATIENCE), Step):
        pass
    return said
