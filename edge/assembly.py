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
from edge.sinks import csv, homeassistant, jsonl, mqtt, sparkplug, sqlite, webhook
from edge.sinks import folder as folder_sink
from edge.sinks.sink import Sink
from edge.sources import folder

if TYPE_CHECKING:
    from edge.spool import Spool


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
        case sparkplug.Settings():
            from edge.sinks.sparkplug.sink import opened as edge_node  # noqa: PLC0415  (loads protobuf)

            return edge_node(wanted, site.line, site.state / "sparkplug")
