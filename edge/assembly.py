"""A line's settings -> its sources, sinks and the rest; the one place that knows every kind of them."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge import settings
from edge.line import Source
from edge.sinks import jsonl, mqtt
from edge.sources import folder
from edge.store import wire

if TYPE_CHECKING:
    from edge.store.arrival import Arrival
    from edge.store.life import Life
    from edge.verify import Guard


class Site(NamedTuple):
    """Where a daemon works: its line's name, and the folder for what must outlive it."""

    line: str
    state: Path


def sources(wanted: Iterable[settings.Source]) -> list[Source]:
    """The sources, opened; EdgeNodeError when one cannot be."""
    found: list[Source] = []
    for each in wanted:
        match each:
            case folder.Settings():
                found.append(folder.Folder(Path(each.path)))
    return found


def sinks(
    wanted: Iterable[settings.Sink], site: Site, closing: contextlib.ExitStack
) -> list[jsonl.JsonLines | mqtt.Mqtt]:
    """The sinks, opened, and closed with `closing`; EdgeNodeError when one cannot be."""
    found: list[jsonl.JsonLines | mqtt.Mqtt] = []
    for each in wanted:
        match each:
            case jsonl.Settings():
                found.append(jsonl.JsonLines(Path(each.path) if each.path else None))
            case mqtt.Settings():
                found.append(mqtt.Mqtt(mqtt.endpoint(each), site.line))
        closing.enter_context(contextlib.closing(found[-1]))
    return found


def arrival(wanted: wire.Settings, site: Site, life: "Life", guard: "Guard | None") -> "Arrival":
    """What takes bundles from the plant's broker; UsageError when the settings or the lack of a guard forbid it."""
    from edge.store.arrival import Arrival  # noqa: PLC0415  (only such a line takes the time to load it)

    return Arrival(wanted, site.line, life, guard)
