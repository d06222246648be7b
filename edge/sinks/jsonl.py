"""Outcomes as JSON lines, in a file or on standard output."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from edge.sinks.append_file import Appending, Ours, write_all
from edge.sinks.sink import Item, SinkDown, wire

_BEGINNING = b'{"seq":'


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="jsonl"):
    """`[[sinks]] kind = "jsonl"`: a JSON object a line."""

    path: str = ""  # standard output


class _Line(Struct):
    seq: int
    id: str


class JsonLines(Appending):
    """A JSON object a line."""

    def __init__(self, path: Path, ours: Ours) -> None:
        self.name = f"jsonl:{path.absolute()}"
        super().__init__(path, ours)

    def line(self, item: Item) -> bytes:
        """The outcome as JSON."""
        return wire(item) + b"\n"

    def read(self, line: bytes) -> tuple[int, str]:
        """Number and id; ValueError for other JSON."""
        found = msgspec.json.decode(line, type=_Line)
        return found.seq, found.id

    def begins(self, half: bytes) -> bool:
        """Whether it begins as ours do."""
        return half.startswith(_BEGINNING) or _BEGINNING.startswith(half)


class StandardOutput:
    """A JSON object a line. Nobody remembers what was read there: after a kill the last outcomes may come again."""

    name = "jsonl:-"

    def __init__(self) -> None:
        self._file = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115  (stays open)

    def deliver(self, items: Sequence[Item]) -> None:
        """Write the lines."""
        try:
            write_all(self._file, b"".join(wire(item) + b"\n" for item in items))
        except OSError as error:
            raise SinkDown(f"cannot write to standard output: {error.strerror}") from error

    def close(self) -> None:
        """Leave it open."""
