"""A line's settings -> its sources, sinks and the rest; the one place that knows every kind of them."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from broker_config.errors import UsageError
from broker_config.link import Endpoint
from edge import settings
from edge.line import Source
from edge.sinks import jsonl, mqtt
from edge.sources import folder, video
from edge.sources import mqtt as mqtt_source

if TYPE_CHECKING:
    from edge.sources.memory import Memory


class Site(NamedTuple):
    """Where a daemon works: its line's name, and the folder for what must outlive it."""

    line: str
    state: Path


def sources(wanted: Iterable[settings.Source], site: Site) -> list[Source]:
    """The sources, opened; EdgeNodeError when one cannot be, UsageError when one is given twice."""
    found: list[Source] = []
    for each in wanted:
        source = _source(each, site)
        if source.name in [other.name for other in found]:
            raise UsageError(f"{source.name} is given twice as a source", "leave one of them out")
        found.append(source)
    return found


def _source(wanted: settings.Source, site: Site) -> Source:
    match wanted:
        case folder.Settings():
            return folder.Folder(wanted, _memory(site, folder.name(wanted)))
        case mqtt_source.Settings():
            ca, cert, key = (Path(each) if each else None for each in (wanted.ca, wanted.cert, wanted.key))
            endpoint = Endpoint.parse(wanted.url, ca=ca, cert=cert, key=key)
            return mqtt_source.Mqtt(wanted, endpoint, site.line, _memory(site, mqtt_source.name(wanted)))
        case video.Settings():
            return video.Video(wanted)


def _memory(site: Site, source: str) -> "Memory":
    from edge.sources.memory import Memory  # noqa: PLC0415  (only some sources need SQLite)

    return Memory(site.state, source)


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
