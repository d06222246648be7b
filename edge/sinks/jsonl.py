"""Outcomes as JSON lines, in a file or on standard output."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from edge.config.instance import Instance
from edge.sinks.append_file import AppendingSink, write_all
from edge.sinks.sink import IsOurs, Item, Origin, SinkDown, to_json

_PREFIX = b'{"seq":'


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="jsonl"
):
    """`[[sinks]] kind = "jsonl"`: a JSON object on each line."""

    path: str = ""  # standard output

    def open_sink(self, instance: Instance, origin: Origin) -> "JsonLines | StandardOutput":
        """Open the sink."""
        if not self.path:
            return StandardOutput()
        return JsonLines(Path(self.path), origin.contains)


class _Identified(Struct):
    seq: int
    id: str


class JsonLines(AppendingSink):
    """A JSON object on each line."""

    def __init__(self, path: Path, is_ours: IsOurs) -> None:
        self.name = f"jsonl:{path.absolute()}"
        super().__init__(path, is_ours)

    def format(self, item: Item) -> bytes:
        """The outcome as JSON."""
        return to_json(item) + b"\n"

    def parse(self, line: bytes) -> tuple[int, str]:
        """Number and id; ValueError for other JSON."""
        found = msgspec.json.decode(line, type=_Identified)
        return found.seq, found.id

    def is_partial(self, half: bytes) -> bool:
        """Whether it begins as ours do."""
        return half.startswith(_PREFIX) or _PREFIX.startswith(half)


class StandardOutput:
    """A JSON object on each line.

    After a kill the last outcomes may come again: nothing shows what was read.
    """

    name = "jsonl:-"

    def __init__(self) -> None:
        self._file = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115  (stays open)

    def deliver(self, items: Sequence[Item]) -> None:
        """Write the lines."""
        try:
            write_all(self._file, b"".join(to_json(item) + b"\n" for item in items))
        except OSError as error:
            raise SinkDown(f"cannot write to standard output: {error.strerror}") from error

    def close(self) -> None:
        """Leave it open."""
