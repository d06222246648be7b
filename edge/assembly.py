"""A line's settings -> its sources, sinks and the rest; the one place that knows every kind of them."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from broker_config.errors import UsageError
from broker_config.topics import check_name
from edge import settings
from edge.delivery import delivering
from edge.line import Nowhere, Outbox, Source
from edge.settings import Settings
from edge.sinks import csv, homeassistant, jsonl, mqtt, sqlite, webhook
from edge.sinks import folder as folder_sink
from edge.sinks.sink import Sink
from edge.sources import folder
from edge.store import wire

if TYPE_CHECKING:
    from edge.spool import Spool
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


@contextlib.contextmanager
def outbox(wanted: Settings, site: Site) -> Iterator[Outbox]:
    """Where outcomes go: into the spool, and from there to the sinks; EdgeNodeError when one cannot be opened."""
    if not wanted.sinks:
        yield Nowhere()
        return
    from edge.spool import opened  # noqa: PLC0415  (loads sqlite3)

    check_name(site.line, "the line's name")
    with opened(site.state / "spool" / site.line, wanted.spool) as spool:
        found = [_sink(each, site, spool) for each in wanted.sinks]
        names = [each.name for each in found]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two sinks are the same: {twice[0]}", "leave one of them out, of the options or the file")
        spool.begin(names)
        with delivering(spool, found):
            yield spool


def _sink(wanted: settings.Sink, site: Site, spool: "Spool") -> Sink:
    match wanted:
        case jsonl.Settings(path=""):
            return jsonl.StandardOutput()
        case jsonl.Settings():
            return jsonl.JsonLines(Path(wanted.path), spool.holds)
        case csv.Settings():
            return csv.Csv(Path(wanted.path), spool.holds)
        case sqlite.Settings():
            return sqlite.Sqlite(Path(wanted.path))
        case folder_sink.Settings():
            return folder_sink.Folder(Path(wanted.path), wanted.most)
        case mqtt.Settings():
            return mqtt.Mqtt(mqtt.broker(wanted, site.line, spool.id), spool.holds)
        case homeassistant.Settings():
            return homeassistant.HomeAssistant(mqtt.broker(wanted, site.line, spool.id), wanted.prefix)
        case webhook.Settings():
            return webhook.Webhook(wanted)


def arrival(wanted: wire.Settings, site: Site, life: "Life", guard: "Guard | None") -> "Arrival":
    """What takes bundles from the plant's broker; UsageError when the settings or the lack of a guard forbid it."""
    from edge.store.arrival import Arrival  # noqa: PLC0415  (only such a line takes the time to load it)

    return Arrival(wanted, site.line, life, guard)
