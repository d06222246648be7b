"""Event that any thread may set, and that a stop request sets too."""

import asyncio
import contextlib
from collections.abc import Iterator


class ThreadEvent(asyncio.Event):
    """An asyncio event that any thread may set."""

    def __init__(self) -> None:
        super().__init__()
        self._running_loop = asyncio.get_running_loop()

    def set_threadsafe(self) -> None:
        """Set it, from any thread; without effect once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._running_loop.call_soon_threadsafe(self.set)


@contextlib.contextmanager
def event_or_stop(stop: asyncio.Event) -> Iterator[ThreadEvent]:
    """An event that is also set when `stop` is."""
    event = ThreadEvent()
    stopping = asyncio.ensure_future(stop.wait())
    stopping.add_done_callback(lambda _: event.set())
    try:
        yield event
    finally:
        stopping.cancel()
