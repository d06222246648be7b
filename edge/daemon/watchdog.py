"""Saying again and again that the line is alive, as long as it is."""

import asyncio
import contextlib
import logging
import time

from edge.daemon.dispatcher import Receivers
from edge.daemon.sd_notify import Manager
from edge.inference import native_memory
from edge.inference.pipeline import Pipeline
from edge.inference.predictor import PROGRESS

_TIDY = 60.0  # seconds after which memory that large images have left is given back
_PAUSE = 10.0  # seconds between two looks, where no watchdog wants more

_log = logging.getLogger(__name__)


async def beat(pipeline: Pipeline, receivers: Receivers, manager: Manager, stop: asyncio.Event) -> None:
    """Keep the service manager's watchdog content while the event loop runs and the threads get on, until `stop`."""
    pause = manager.watchdog / 4 if manager.watchdog else _PAUSE  # two of them, and as long for a slow step
    tidied = time.monotonic()
    while not stop.is_set():
        if not await _gets_on(pipeline, pause):
            _log.error("nothing was judged for %s s: a thread of the line does not answer", pause)
            continue
        manager.tell(WATCHDOG=1, STATUS=status(pipeline, receivers))
        if time.monotonic() - tidied > _TIDY:
            await asyncio.to_thread(native_memory.trim_heap)
            tidied = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)


async def _gets_on(pipeline: Pipeline, patience: float) -> bool:
    """Whether decoders and worker answer, or at least get on with what they have: large frames take longer."""
    before = PROGRESS.steps
    try:
        async with asyncio.timeout(patience):
            await pipeline.ping()
    except TimeoutError:
        return PROGRESS.steps != before
    return True


def status(pipeline: Pipeline, receivers: Receivers) -> str:
    """A line's state in a line of text."""
    found = f"{pipeline.model.manifest.id}: {pipeline.inspected} images judged"
    return f"{found}, {waiting} outcomes wait" if (waiting := receivers.waiting()) else found
