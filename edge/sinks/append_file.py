"""Appending of outcomes to a file, each once:
the last line of the file tells how far it has come.
"""

import contextlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from broker_config.protocol.errors import UsageError
from edge.sinks.sink import IsOurs, Item, SinkDown

_TAIL = 1 << 20  # bytes at the end of a file in which its last line must begin


class AppendingSink(ABC):
    """Appends a line for each outcome to a file, and syncs it before the next batch.

    A kill or a full disk can leave half a line: it is cut off and written again. When the file was
    moved away, as log rotation does, a new one is begun.
    """

    header = b""  # the first line of a new file
    name: str

    def __init__(self, path: Path, is_ours: IsOurs) -> None:
        """Open or create the file; UsageError when it cannot be written."""
        self._path = path
        self._is_ours = is_ours
        try:
            self._open()
        except OSError as error:
            raise UsageError(
                f"cannot write verdicts to {path}: {error.strerror}",
                "name a file in a folder that exists, on a disk with room",
            ) from error

    @abstractmethod
    def format(self, item: Item) -> bytes:
        """The line of an outcome."""

    @abstractmethod
    def parse(self, line: bytes) -> tuple[int, str]:
        """Number and id of the outcome in a whole line; ValueError when somebody else wrote it."""

    @abstractmethod
    def is_partial(self, half: bytes) -> bool:
        """Whether this may be the beginning of one of our lines."""

    def deliver(self, items: Sequence[Item]) -> None:
        """Append what the file does not have yet."""
        try:
            if self._is_regular and not self._is_in_place():
                self._file.close()
                self._open()
            lines = b"".join(self.format(item) for item in items if item.seq > self._last)
            if items:
                write_all(self._file, lines, sync=self._is_regular)
        except OSError as error:
            if self._is_regular:
                self._file.close()  # opening it again shows what it has
            raise SinkDown(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._last = 0  # the last outcome that the file has
        self._file: BinaryIO = self._path.open("ab", buffering=0)
        # no pipe and no device
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        if self._is_regular:
            self._recover()

    def _recover(self) -> None:
        """Cut off half a line, and read from the last whole one how far we have come."""
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            whole, newline, half = file.read().rpartition(b"\n")
        if half and self.is_partial(half):
            os.truncate(self._path, size - len(half))
            size -= len(half)
        elif half:
            self._file.write(b"\n")
        if not size:
            self._file.write(self.header)
        with contextlib.suppress(ValueError):
            seq, id_ = self.parse(whole.rpartition(b"\n")[2])
            self._last = seq if newline and self._is_ours(seq, id_) else 0

    def _is_in_place(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return not self._file.closed and os.path.samestat(
                self._path.stat(), os.fstat(self._file.fileno())
            )
        return False


def write_all(file: BinaryIO, data: bytes, *, sync: bool = False) -> None:
    """Write to an unbuffered file, with `sync` through to the disk; OSError,
    and nothing written, when that fails.
    """
    left = memoryview(data)
    before = os.fstat(file.fileno())
    try:
        while left:
            left = left[file.write(left) :]
        if sync:
            os.fdatasync(file.fileno())
    except OSError:
        if stat.S_ISREG(before.st_mode) and len(left) < len(data):
            os.ftruncate(file.fileno(), before.st_size)
        raise
