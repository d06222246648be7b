"""Hash chain: facts in a row, of which none can be changed, removed,
added or moved without all later ones changing.

An entry is a line of JSON. Its `number` counts from 1, its `before` is the SHA-256 of the line
before it (empty in the first). There is one encoding only: sorted keys, no white space, UTF-8,
numbers as Python writes them. So whoever has SHA-256 can follow the chain, and no line can be read
in two ways. The newest entry's number and hash, the head, stand for all entries.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from broker_config.protocol.messages import RecordHead
from broker_config.storage import disk

LARGEST = 1 << 24  # bytes of a line
_MOST = 1 << 28  # bytes of a file: 250,000 rounds of five members
Entry = dict[str, Any]


class ChainError(ValueError):
    """A line that is no entry, or does not follow the one before;
    the text names the line and says what is wrong.
    """


def encode(value: Mapping[str, object]) -> bytes:
    """The one encoding of an object."""
    return json.dumps(
        value,
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
        sort_keys=True,
        check_circular=False,
    ).encode()


def decode(line: bytes) -> Entry:
    """The object in a line; ValueError unless this is its one encoding."""
    if len(line) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        if encode(value) != line:
            raise ValueError("it is not encoded as entries are, so it was changed")
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value


def head_of(line: bytes, number: int) -> RecordHead:
    """The head of a chain that ends with this line."""
    return RecordHead(entries=number, digest=hashlib.sha256(line).hexdigest())


def link(fact: Mapping[str, object], head: RecordHead | None) -> tuple[bytes, RecordHead]:
    """The line with which a fact follows the newest entry, and the head that it makes."""
    number, before = (head.entries + 1, head.digest) if head else (1, "")
    line = encode({**fact, "number": number, "before": before})
    return line, head_of(line, number)


def chain(
    facts: Iterable[Mapping[str, object]], head: RecordHead | None = None
) -> Iterator[tuple[bytes, RecordHead]]:
    """Each fact's line, and the head that it makes."""
    newest = head
    for fact in facts:
        line, newest = link(fact, newest)
        yield line, newest


def follow(chained: Iterable[bytes]) -> Iterator[tuple[Entry, RecordHead]]:
    """Each entry, once it is known to follow the one before, and the head that it makes.

    Raises:
        ChainError: a line is no entry, or does not follow.
    """
    head = None
    for number, line in enumerate(chained, 1):
        try:
            entry = decode(line)
        except ValueError as error:
            raise ChainError(f"line {number}: {error}") from None
        if type(found := entry.get("number")) is not int or found != number:
            raise ChainError(
                f"line {number}: entry {number} should be there, it has the number {found!r:.40}"
            )
        digest = head.digest if head else ""
        if entry.get("before") != digest:
            raise ChainError(
                f"line {number}: entry {number} does not fit the one before: one of them was "
                "changed"
            )
        head = head_of(line, number)
        yield entry, head


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; of a last one that is not complete, nothing.

    OSError, or ChainError: it is too large.
    """
    with disk.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST:
            raise ChainError(f"it has more than {_MOST} bytes")
        while (line := file.readline(LARGEST + 2)).endswith(b"\n"):
            yield line[:-1]
        if len(line) > LARGEST:
            raise ChainError(f"a line has more than {LARGEST} bytes")
