"""A line's settings -> its sources, sinks and the rest; the one place that knows every kind of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from broker_config.mqtt.client import Endpoint
from broker_config.protocol.errors import UsageError
from edge.config import line_settings
from edge.inference.pipeline import Source
from edge.registry import bundle_messages
from edge.sinks import csv, homeassistant, jsonl, mqtt, sparkplug, sqlite, webhook
from edge.sinks import folder as folder_sink
from edge.sinks.sink import Sink
from edge.sources import camera, folder
from edge.sources import mqtt as mqtt_source

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier
    from edge.outbox.outbox import Spool
    from edge.registry.bundle_receiver import BundleReceiver
    from edge.registry.rollout import Rollout
    from edge.sources.source_checkpoint import Memory


class Site(NamedTuple):
    """Where a daemon works: its line's name, and the folder for what must outlive it."""

    line: str
    state: Path


def sources(wanted: Iterable[line_settings.Source], site: Site) -> list[Source]:
    """The sources, opened; EdgeNodeError when one cannot be, UsageError when one is given twice."""
    found: list[Source] = []
    for each in wanted:
        source = _source(each, site)
        if source.name in [other.name for other in found]:
            raise UsageError(f"{source.name} is given twice as a source", "leave one of them out")
        found.append(source)
    return found


def _source(wanted: line_settings.Source, site: Site) -> Source:
    match wanted:
        case folder.Settings():
            return folder.Folder(wanted, _memory(site, folder.name(wanted)))
        case mqtt_source.Settings():
            ca, cert, key = (Path(each) if each else None for each in (wanted.ca, wanted.cert, wanted.key))
            endpoint = Endpoint.parse(wanted.url, ca=ca, cert=cert, key=key)
            return mqtt_source.Mqtt(wanted, endpoint, site.line, _memory(site, mqtt_source.name(wanted)))
        case camera.Settings():
            return camera.Video(wanted)


def _memory(site: Site, source: str) -> "Memory":
    from edge.sources.source_checkpoint import Memory  # noqa: PLC0415  (only some sources need SQLite)

    return Memory(site.state, source)


def sink(wanted: line_settings.Sink, site: Site, spool: "Spool") -> Sink:
    """A sink that takes from `spool`, opened; EdgeNodeError when it cannot be."""
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
            return folder_sink.Folder(Path(wanted.path), wanted.most, spool.holds)
        case mqtt.Settings():
            return mqtt.Mqtt(mqtt.broker(wanted, site.line, spool.id), spool.holds)
        case homeassistant.Settings():
            return homeassistant.HomeAssistant(mqtt.broker(wanted, site.line, spool.id), wanted.prefix)
        case webhook.Settings():
            return webhook.Webhook(wanted)
        case sparkplug.Settings():
            from edge.sinks.sparkplug.sparkplug_sink import opened as edge_node  # noqa: PLC0415  (loads protobuf)

            return edge_node(wanted, site.line, site.state / "sparkplug")


def bundle_receiver(
    wanted: bundle_messages.Settings, site: Site, rollout: "Rollout", verifier: "Verifier | None"
) -> "BundleReceiver":
    """The receiver of bundles from the plant's broker; UsageError when its settings clash or there is no verifier."""
    from edge.registry.bundle_receiver import BundleReceiver  # noqa: PLC0415  (only loaded where it is used)

    return BundleReceiver(wanted, site.line, rollout, verifier)
