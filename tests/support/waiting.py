"""Waiting for what a test expects, however busy the machine is."""

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds, after which nothing will come any more


def wait_until(condition: Callable[[], object]) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what is waited for does not come"
        time.sleep(0.005)
