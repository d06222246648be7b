"""Record of a line: every event of its bundles as a hash chain,
in `record.jsonl` beside the store's state.

An event is a fact of the state, which has the newest of them with their places in the chain. It is
copied here afterwards: a kill in between loses none and doubles none, since the next change copies
all that is not here yet.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.messages import RecordHead
from broker_config.storage import disk, hash_chain
from broker_config.storage.hash_chain import ChainError

FILE = "record.jsonl"
What = Literal["added", "activated", "refused", "confirmed", "rolled back", "kept"]
_TAIL = 1 << 20  # bytes at the end of the file, more than any event has

_log = logging.getLogger(__name__)


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened to a bundle."""

    what: What
    bundle: str
    time: str  # ISO 8601, UTC
    by: str  # on whose behalf
    why: str = ""
    # of the bundle's manifest, of which `bundle` is the beginning; empty if it was not there
    sha256: str = ""
    serving: str = ""  # the bundle that is active from then on
    number: Annotated[int, Meta(ge=0)] = 0  # in the record; 0: it is older than that
    before: str = ""  # SHA-256 of the entry before


def entry(event: Event) -> bytes:
    """The line of an event. What is empty is left out, so that later versions may add fields."""
    fields = {name: value for name, value in msgspec.to_builtins(event).items() if value}
    return hash_chain.encode({**fields, "before": event.before})


def head(folder: Path, history: Sequence[Event]) -> RecordHead | None:
    """The head of a record whose newest events are `history`.

    After the state was lost, or restored from an older copy, the file is ahead of it, and goes on.
    """
    found = [hash_chain.head_of(entry(event), event.number) for event in history if event.number][
        -1:
    ]
    with suppress(OSError, ChainError):  # `copy` logs it
        found += [newest for newest in _newest(folder)[1:] if newest]
    return max(found, key=lambda each: each.entries, default=None)


def copy(folder: Path, history: Sequence[Event]) -> None:
    """Copy the events that are not in the file yet.

    If that fails, they wait in the state, and it is logged.
    """
    path = folder / FILE
    try:
        end, newest = _newest(folder)
        missing = []
        for event in history:
            entries = newest.entries if newest else 0
            if event.number > entries:
                missing.append(event)
        if not missing:
            return
        if newest and missing[0].before != newest.digest:
            raise ChainError(f"entry {missing[0].number} does not follow its last one")
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.truncate(end)  # what a killed process has left half written
            file.write(b"".join(entry(event) + b"\n" for event in missing))
            file.flush()
            os.fsync(file.fileno())
        disk.sync(folder)
    except (OSError, ChainError) as error:
        _log.error(
            "the record %s cannot go on: %s; restore it from a copy, or move it away and keep it",
            path,
            error,
        )


def read(folder: Path, history: Sequence[Event]) -> Iterator[bytes]:
    """All lines of a record, those that are not in the file yet too.

    OSError, or ChainError: it cannot be read.
    """
    line = b""
    if (folder / FILE).exists():
        for line in hash_chain.read_lines(folder / FILE):
            yield line
    number = _number(line)
    yield from (entry(event) for event in history if event.number > number)


def _newest(folder: Path) -> tuple[int, RecordHead | None]:
    """Where the last complete line of the file ends, and the head that it makes."""
    path = folder / FILE
    if not path.exists():
        return 0, None
    with disk.open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    line = complete[:-1].rpartition(b"\n")[2]
    if not _number(line) and (complete or size > len(data)):
        raise ChainError("its last line is no entry")
    head_of = hash_chain.head_of(line, _number(line)) if complete else None
    return size - len(data) + len(complete), head_of


def _number(line: bytes) -> int:
    """The number of the entry in a line; 0 if it is none."""
    try:
        number = hash_chain.decode(line).get("number")
    except ValueError:
        return 0
    return number if type(number) is int else 0
