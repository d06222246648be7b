"""A line's settings: the tables of `edge-node serve --config FILE`;
its other keys are the command's options.

Each kind of source and sink, and each table, has its settings beside what they set.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError, suggest
from broker_config.registry import Registry
from edge.config.options_file import load
from edge.daemon import logs
from edge.daemon.line_parts import AddedPartSettings
from edge.inference.class_prior import Prior
from edge.inference.tiling import View
from edge.labelling import label_queue
from edge.outbox.limits import Limits
from edge.registry.pre_rollout_checks import Gate
from edge.sinks import jsonl, mqtt
from edge.sinks.sink import SinkSettings
from edge.sources import folder
from edge.sources.source import SourceSettings
from edge.uncertainty import drift as drifting
from edge.uncertainty import image_retention as keeping
from edge.uncertainty import uncertainty_check

SOURCES: Registry[type[SourceSettings]] = Registry("sources")
SINKS: Registry[type[SinkSettings]] = Registry("sinks")
ADDED_PARTS: Registry[type[AddedPartSettings]] = Registry("line_parts", needed=False)
if TYPE_CHECKING:
    Source = SourceSettings
    Sink = SinkSettings
else:
    Source = Union[tuple(SOURCES.values())]  # noqa: UP007  (as many as there are)
    Sink = Union[tuple(SINKS.values())]  # noqa: UP007


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a line looks at and how, and where its outcomes go."""

    view: View = View()
    prior: Prior = Prior()
    doubt: uncertainty_check.Settings = uncertainty_check.Settings()
    drift: drifting.Settings = drifting.Settings()
    keep: keeping.Settings | None = None
    labels: label_queue.Settings | None = None
    sources: tuple[Source, ...] = ()
    sinks: tuple[Sink, ...] = ()
    log: logs.Settings = logs.Settings()
    spool: Limits = Limits()
    gate: Gate = Gate()
    added: dict[str, AddedPartSettings] = {}  # parts that packages add, by the name of their table

    def __post_init__(self) -> None:
        """Raise ValueError where a table needs another."""
        if self.labels and not self.keep:
            raise ValueError("[labels] needs the table [keep], which says where images wait")


TABLES = tuple(name for name in Settings.__struct_fields__ if name != "added")
# Fields that name files, relative to the file of the settings.
_PATHS = ("path", "input", "producer", "ca", "cert", "key", "server_cert")


def parse(tables: dict[str, Any], file: Path) -> Settings:
    """The settings in the tables of a TOML file;
    UsageError names the table and the key that does not fit.
    """
    known = [*TABLES, *ADDED_PARTS]
    if unknown := [name for name in tables if name not in known]:
        raise UsageError(
            f"{file}: there is no table [{unknown[0]}]",
            f"{suggest(unknown[0], known)} (or install the package that adds this table)",
        )
    located = _located(tables, file.parent)
    added = {name: located.pop(name) for name in tables if name not in TABLES}
    try:
        settings = msgspec.convert(located, Settings)
        return msgspec.structs.replace(settings, added=_convert_added(added))
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{file}: {error}",
            "see docs/line.md for what each table may hold; packages add further kinds",
        ) from error


def _convert_added(tables: dict[str, Any]) -> dict[str, AddedPartSettings]:
    """Return the settings in tables of parts that packages add."""
    fields = [(name, ADDED_PARTS[name]) for name in tables]
    # errors then name the table as those of the other tables do
    found = msgspec.convert(tables, msgspec.defstruct("Added", fields))
    return msgspec.structs.asdict(found)


def load_verdict_settings(file: Path) -> Settings:
    """The tables of a line's TOML file on which verdicts depend, `[view]` and `[prior]`,
    the rest left at its default.

    UsageError as `options_file.load` and `parse` raise it.
    """
    return parse(
        {key: table for key, table in load(file).items() if key in ("view", "prior")}, file
    )


def add_options(
    settings: Settings,
    watch: Path | None,
    output: Path | None,
    url: str | None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
) -> Settings:
    """The settings, and what the command's options add: a watched folder,
    a file of JSON lines, a broker.

    Outcomes of a watched folder that have nowhere else to go are written to standard output.
    """
    sources = list(settings.sources)
    sinks = list(settings.sinks)
    if watch:
        sources.append(folder.Settings(path=str(watch)))
    if output:
        sinks.append(jsonl.Settings(path=str(output)))
    if url:
        paths = []
        for each in (ca, cert, key):
            path = str(each) if each else None
            paths.append(path)
        ca_, cert_, key_ = paths
        sinks.append(mqtt.Settings(url=url, ca=ca_, cert=cert_, key=key_))
    if sources and not sinks:
        sinks.append(jsonl.Settings())
    return msgspec.structs.replace(settings, sources=tuple(sources), sinks=tuple(sinks))


def _located(value: Any, folder: Path) -> Any:
    """The same tables, their relative paths starting at `folder`."""
    if isinstance(value, list):
        return [_located(each, folder) for each in value]
    if not isinstance(value, dict):
        return value
    folders = {}
    for key, each in value.items():
        folders[key] = (
            str(folder / each) if key in _PATHS and _names_file(each) else _located(each, folder)
        )
    return folders


def _names_file(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "://" not in value
