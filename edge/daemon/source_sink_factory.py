"""Factory of a line's sources, sinks and receivers from its settings."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from broker_config.protocol.errors import UsageError
from edge.daemon import line_settings
from edge.inference.pipeline import Source
from edge.registry import bundle_messages
from edge.sinks import csv, homeassistant, jsonl, mqtt, opcua, sparkplug, sqlite, webhook
from edge.sinks import folder as folder_sink
from edge.sinks.sink import Sink
from edge.sources import camera, folder, genicam
from edge.sources import mqtt as mqtt_source
from edge.sources import opcua as opcua_source

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier
    from edge.outbox.outbox import Outbox
    from edge.registry.bundle_receiver import BundleReceiver
    from edge.registry.rollout import Rollout
    from edge.sources.source_checkpoint import SourceCheckpoint


class Instance(NamedTuple):
    """One daemon of those on this machine: its line's name,
    and the folder for what must outlive the process.
    """

    line: str
    state: Path


def open_sources(wanted: Iterable[line_settings.Source], instance: Instance) -> list[Source]:
    """The sources, opened; EdgeNodeError when one cannot be, UsageError when one is given twice."""
    sources: list[Source] = []
    for each in wanted:
        source = _open_source(each, instance)
        if source.name in [other.name for other in sources]:
            raise UsageError(f"{source.name} is given twice as a source", "leave one of them out")
        sources.append(source)
    return sources


def _open_source(wanted: line_settings.Source, instance: Instance) -> Source:
    match wanted:
        case folder.Settings():
            return folder.Folder(wanted, _checkpoint(instance, folder.source_name(wanted)))
        case mqtt_source.Settings():
            return mqtt_source.Mqtt(
                wanted, instance.line, _checkpoint(instance, mqtt_source.source_name(wanted))
            )
        case camera.Settings():
            return camera.Video(wanted)
        case opcua_source.Settings():
            return opcua_source.OpcUa(wanted)
        case genicam.Settings():
            return genicam.Genicam(wanted)


def _checkpoint(instance: Instance, source: str) -> "SourceCheckpoint":
    # Only some sources need SQLite
    from edge.sources.source_checkpoint import SourceCheckpoint  # noqa: PLC0415

    return SourceCheckpoint(instance.state, source)


def open_sink(wanted: line_settings.Sink, instance: Instance, outbox: "Outbox") -> Sink:
    """A sink that `outbox` delivers to, opened; EdgeNodeError when it cannot be."""
    match wanted:
        case jsonl.Settings(path=""):
            return jsonl.StandardOutput()
        case jsonl.Settings():
            return jsonl.JsonLines(Path(wanted.path), outbox.contains)
        case csv.Settings():
            return csv.Csv(Path(wanted.path), outbox.contains)
        case sqlite.Settings():
            return sqlite.Sqlite(Path(wanted.path))
        case folder_sink.Settings():
            return folder_sink.Folder(Path(wanted.path), wanted.most, outbox.contains)
        case mqtt.Settings():
            return mqtt.Mqtt(mqtt.broker(wanted, instance.line, outbox.id), outbox.contains)
        case homeassistant.Settings():
            return homeassistant.HomeAssistant(
                mqtt.broker(wanted, instance.line, outbox.id), wanted.prefix
            )
        case webhook.Settings():
            return webhook.Webhook(wanted)
        case opcua.Settings():
            return opcua.OpcUa(wanted)
        case sparkplug.Settings():
            from edge.sinks.sparkplug import sparkplug_sink  # noqa: PLC0415  (loads protobuf)

            return sparkplug_sink.open_sink(wanted, instance.line, instance.state / "sparkplug")


def open_bundle_receiver(
    wanted: bundle_messages.Settings,
    instance: Instance,
    rollout: "Rollout",
    verifier: "Verifier | None",
) -> "BundleReceiver":
    """The receiver of bundles from the plant's broker;
    UsageError when the settings or a missing verifier forbid it.
    """
    # Only loaded where it is used
    from edge.registry.bundle_receiver import BundleReceiver  # noqa: PLC0415

    return BundleReceiver(wanted, instance.line, rollout, verifier)


class Part(Protocol):
    """Something that was made from its settings, `wanted`."""

    @property
    def wanted(self) -> Any:
        """Its settings."""


P = TypeVar("P", bound=Part)
W = TypeVar("W")


def diff(current: Sequence[P], wanted: Sequence[W]) -> tuple[list[P], list[W], list[P]]:
    """Which current parts stay, which settings have no part yet,
    and which parts are no longer wanted.
    """
    old = list(current)
    kept = []
    missing = []
    for each in wanted:
        found = next((part for part in old if part.wanted == each), None)
        if found is None:
            missing.append(each)
        else:
            old.remove(found)
            kept.append(found)
    return kept, missing, old
