"""Records of finished runs as JSON lines, in files that git merges and that a kill at any time
leaves usable.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.storage.disk import writing

_ATTRIBUTES = "*.jsonl merge=union\n"  # git keeps the lines of both sides


R = TypeVar("R")


class Records(Generic[R]):
    """A file with a record a line. Several processes may add to it at once."""

    def __init__(self, path: Path, kind: type[R]):
        self._path, self._kind = path, kind

    def __iter__(self) -> Iterator[R]:
        """All of them; UsageError if a line is damaged."""
        if not self._path.exists():
            return
        lines = self._path.read_bytes().split(b"\n")
        # what follows the last line break was torn off
        for number, line in enumerate(lines[:-1], 1):
            try:
                yield msgspec.json.decode(line, type=self._kind)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"{self._path} is damaged in line {number}: {error}", "remove that line"
                ) from error

    def add(self, record: R) -> None:
        """Append a record; it is on the disk when this returns.

        EdgeNodeError if the disk does not take it.
        """
        folder = self._path.parent
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not (attributes := folder / ".gitattributes").exists():
                attributes.write_text(_ATTRIBUTES)
            _append(self._path, msgspec.json.Encoder().encode_lines([record]))


def _append(path: Path, lines: bytes) -> None:
    """Add whole lines at the end, where a torn one is removed first."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or we are killed
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.ftruncate(file, path.read_bytes().rfind(b"\n") + 1)
        while lines:
            lines = lines[os.write(file, lines) :]
        os.fsync(file)
    finally:
        os.close(file)
