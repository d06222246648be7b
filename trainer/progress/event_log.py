"""Log of a federation's events: JSON lines with their times,
in the state folder of its coordinator.

It has what the journal has not: what nodes did when and what they told of themselves, who came,
went and erred.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from trainer.progress.events import (
    Activity,
    AnyEvent,
    CellFinished,
    Exported,
    Learning,
    Report,
    Result,
    Step,
)

FILE = "events.jsonl"
_MOST = 1 << 28  # bytes; a run of 50 nodes and 1,000 rounds takes 20 MB
_LEFT_OUT = (Step, Learning, Exported, CellFinished, Result)

T = TypeVar("T")


class Logged(msgspec.Struct, frozen=True):
    """An event, and when it happened in seconds since 1970."""

    time: float
    event: AnyEvent


_decoder: msgspec.json.Decoder[Logged] = msgspec.json.Decoder(Logged)


@contextmanager
def logging(folder: Path, report: Report) -> Iterator[Report]:
    """A report that also writes events to the log of a state folder;
    of a transfer's progress only the beginning.

    It is not synced, and what the disk does not take is left out: no round depends on it.
    """
    doing: dict[str, tuple[int, str]] = {}
    try:
        log = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:
        yield report
        return

    def write(event: AnyEvent) -> None:
        report(event)
        if isinstance(event, _LEFT_OUT):
            return
        if isinstance(event, Activity):
            before = doing.get(event.node)
            doing[event.node] = (event.round, event.what)
            if before == doing[event.node]:
                return
        with suppress(OSError):
            if os.fstat(log).st_size < _MOST:
                os.write(log, msgspec.json.encode(Logged(round(time.time(), 3), event)) + b"\n")

    try:
        yield write
    finally:
        os.close(log)


def read(folder: Path, start: int = 0) -> tuple[list[Logged], int]:
    """What the log of a folder holds from this byte on, and where that ends.

    Raises: as `read_lines`.
    """
    return read_lines(folder / FILE, start, _decoder)


def read_lines(path: Path, start: int, decoder: msgspec.json.Decoder[T]) -> tuple[list[T], int]:
    """What JSON lines hold from this byte on, and where that ends.

    Damaged and half written lines are left out.

    Raises:
        OSError: the file cannot be read; there being none is no error.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return [], 0
    whole = content.rfind(b"\n") + 1
    return list(_decode(content[:whole], decoder)), start + whole


def _decode(lines: bytes, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    for line in lines.splitlines():
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield decoder.decode(line)
