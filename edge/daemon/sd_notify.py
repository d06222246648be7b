"""Notifications to the service manager, as sd_notify(3) defines them: readiness, reload,
status and watchdog.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping

from edge.daemon.dispatcher import Dispatcher
from edge.inference import native_memory
from edge.inference.pipeline import Pipeline
from edge.inference.predictor import PROGRESS

# seconds after which memory that large images have left behind is returned to the system
_TRIM = 60.0
_PAUSE = 5.0  # seconds between two checks, where no watchdog wants more

_log = logging.getLogger(__name__)


class ServiceManager:
    """The service manager that started this process; without one, notifications go nowhere.

    `environment` names its socket (NOTIFY_SOCKET: a path, or "@" and an abstract name) and its
    watchdog.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        # seconds within which it expects the next notification; None: never
        self.watchdog = _watchdog(environment)

    def notify(self, **variables: str | int) -> None:
        """Send variables, such as READY=1; nobody waits for an answer,
        and a manager that is gone does not matter.
        """
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)  # a manager that does not read must not stop the line
                out.sendto(text.encode(), self._address)
        except OSError:
            return

    def notify_reloading(self) -> None:
        """Announce that settings are being read again; READY=1 ends that."""
        self.notify(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)


def _watchdog(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return (
        int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) and mine else None
    )


async def run_watchdog(
    pipeline: Pipeline, dispatcher: Dispatcher, manager: ServiceManager, stop: asyncio.Event
) -> None:
    """Feed the service manager's watchdog while the event loop runs and the threads make
    progress, until `stop`.
    """
    # two of them, and as long for a slow step
    pause = manager.watchdog / 4 if manager.watchdog else _PAUSE
    trimmed = time.monotonic()
    while not stop.is_set():
        pipeline.stalled = not await _makes_progress(pipeline, pause)
        if pipeline.stalled:
            _log.error(
                "nothing was inspected for %s s: a thread of the line does not answer", pause
            )
            continue
        manager.notify(WATCHDOG=1, STATUS=status(pipeline, dispatcher))
        if time.monotonic() - trimmed > _TRIM:
            await asyncio.to_thread(native_memory.trim_heap)
            trimmed = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)


async def _makes_progress(pipeline: Pipeline, seconds: float) -> bool:
    """Whether decoders and worker answer within `seconds`, or at least compute:
    large frames take longer.
    """
    before = PROGRESS.steps
    try:
        async with asyncio.timeout(seconds):
            await pipeline.ping()
    except TimeoutError:
        return PROGRESS.steps != before
    return True


def status(pipeline: Pipeline, dispatcher: Dispatcher) -> str:
    """A line's state, in a line of text."""
    text = f"{pipeline.model.manifest.id}: {pipeline.inspected} images inspected"
    return f"{text}, {pending} outcomes wait" if (pending := dispatcher.pending()) else text
