"""A line's settings -> its sources, sinks and the rest; the one place that knows every kind of them."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from broker_config.errors import UsageError
from broker_config.topics import check_name
from edge import settings
from edge.delivery import delivering
from edge.doubt.doubts import Doubts
from edge.doubt.drift import Drift
from edge.doubt.keep import Keep
from edge.line import Nowhere, Outbox, Source, Watcher
from edge.settings import Settings
from edge.sinks import csv, homeassistant, jsonl, mqtt, sqlite, webhook
from edge.sinks import folder as folder_sink
from edge.sinks.sink import Sink
from edge.sources import folder

if TYPE_CHECKING:
    from edge.metrics import Metrics
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


def watchers(wanted: Settings, outbox: Outbox, metrics: "Metrics", closing: contextlib.ExitStack) -> list[Watcher]:
    """Those who have a say in verdicts, in their order; EdgeNodeError when the folder for images cannot be used."""
    found: list[Watcher] = [Doubts(wanted.doubt)]
    if wanted.drift.window:
        drift = Drift(wanted.drift, min(1, wanted.doubt.novelty + wanted.doubt.disagreement), outbox)
        metrics.gauge("drifted", "1 while there is an alarm about drift", lambda: drift.drifted)
        metrics.gauge("drift_level", "How far features have strayed, in control limits", lambda: drift.level)
        metrics.gauge(
            "doubt_level", "How many more are in doubt than expected, in control limits", lambda: drift.excess
        )
        metrics.gauge("doubtful_ratio", "Share of images in doubt of late", lambda: drift.doubtful)
        found.append(drift)
    if wanted.keep:
        keep = closing.enter_context(contextlib.closing(Keep(wanted.keep)))
        metrics.counter("images_lost", "Images that should have been kept and were not", lambda: keep.lost)
        found.append(keep)
    return found


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
