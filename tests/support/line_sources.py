"""Sources of a line, as its settings open them, and a line that judges what they bring."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from edge.config.instance import Instance
from edge.daemon import line_parts, line_settings
from edge.inference.outcomes import Outcome
from edge.inference.pipeline import Pipeline, Source
from edge.sources import source_runner
from tests.support.tiny_bundle import RED

FOLDER: dict[str, Any] = {"kind": "folder", "path": "camera"}


class Outbox:
    """Keeps the outcomes until somebody asks for them."""

    def __init__(self) -> None:
        self._outcomes: queue.Queue[Outcome] = queue.Queue()

    def put(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)

    async def next(self, count: int = 1) -> list[Any]:
        """The next outcomes."""
        return [await asyncio.to_thread(self._outcomes.get, timeout=60) for _ in range(count)]

    def rest(self) -> list[Any]:
        """All that have not been asked for."""
        return [self._outcomes.get_nowait() for _ in range(self._outcomes.qsize())]


def opened(instance: Instance, *tables: dict[str, Any]) -> list[Source]:
    """The sources of `[[sources]]` tables in a file beside the state folder."""
    wanted = line_settings.parse({"sources": list(tables)}, instance.state.parent / "line.toml")
    return line_parts.open_sources(wanted.sources, instance)


@contextlib.asynccontextmanager
async def fed(model: Any, *sources: Source) -> AsyncIterator[Outbox]:
    """A line that judges what these bring, until the block ends; then all is done."""
    outbox, stop = Outbox(), asyncio.Event()
    with contextlib.closing(Pipeline(model, outbox)) as line:
        feeding = [
            asyncio.create_task(source_runner.run_source(line, source, stop)) for source in sources
        ]
        try:
            yield outbox
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*feeding), 60)


def put(folder: Path, *names: str, data: bytes = RED) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def judged_names(model: Any, instance: Instance, table: dict[str, Any], count: int) -> list[str]:
    async def run() -> list[str]:
        async with fed(model, *opened(instance, table)) as outbox:
            found = await outbox.next(count)
        return [outcome.image for outcome in found + outbox.rest()]

    return asyncio.run(run())
