"""A line's settings -> its sources, sinks and the rest; the one place that knows every kind of them."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from edge import settings
from edge.doubt.doubts import Doubts
from edge.doubt.drift import Drift
from edge.doubt.keep import Keep
from edge.line import Outbox, Source, Watcher
from edge.sinks import jsonl, mqtt
from edge.sources import folder


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


def watchers(wanted: settings.Settings, outbox: Outbox, closing: contextlib.ExitStack) -> list[Watcher]:
    """Those who have a say in verdicts, in their order; EdgeNodeError when the folder for images cannot be used."""
    found: list[Watcher] = [Doubts(wanted.doubt)]
    if wanted.drift.window:
        found.append(Drift(wanted.drift, min(1, wanted.doubt.novelty + wanted.doubt.disagreement), outbox))
    if wanted.keep:
        found.append(closing.enter_context(contextlib.closing(Keep(wanted.keep))))
    return found
