"""Waiting for a thread's news and for the end at once."""

import asyncio
import contextlib
from collections.abc import Iterator


class Bell(asyncio.Event):
    """An event that any thread may set."""

    def __init__(self) -> None:
        super().__init__()
        self._home = asyncio.get_running_loop()

    def ring(self) -> None:
        """Set it, from any thread; nothing happens once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._home.call_soon_threadsafe(self.set)


@contextlib.contextmanager
def bell(stop: asyncio.Event) -> Iterator[Bell]:
    """A bell that `stop` rings too."""
    found = Bell()
    waiting = asyncio.ensure_future(stop.wait())
    waiting.add_done_callback(lambda _: found.set())
    try:
        yield found
    finally:
        waiting.cancel()
