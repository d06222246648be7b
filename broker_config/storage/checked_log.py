"""A log of JSON lines that several processes may append to, and whose damage is noticed.

Theory of operation
-------------------
Each line holds a value and a checksum over that and the checksum of the line before. A changed,
missing or exchanged line therefore breaks the chain, and the last line has a checksum of its own.

What the lines cannot show is that the newest of them are gone: the file is missing, was cut off
between two lines, or is an older copy. So a small file beside the log, `NAME.newest`, says how many
lines there were. It is written after the line. A kill in between leaves a log with more lines than
the small file counts; that is not damage.

A power cut may leave part of a line, without the line break at its end. Nobody was told that it
was written: readers leave it out, and who appends next cuts it off.
"""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

import msgspec

from broker_config.storage import checksums, disk
from broker_config.storage.checksums import DamagedError

_MOST = 1 << 30  # bytes; a million labelled images take half of it

T = TypeVar("T")


class _Line(msgspec.Struct, frozen=True):
    sha256: str
    value: msgspec.Raw


class _Newest(msgspec.Struct, frozen=True):
    entries: int = 0
    sha256: str = ""  # of the last of them


class _Position(NamedTuple):
    """The position up to which a log was read."""

    end: int = 0  # bytes
    entries: int = 0
    sha256: str = ""  # of the last of them


class CheckedLog(Generic[T]):
    """A reader and writer of one log. For one thread at a time."""

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[T], *, mode: int = 0o666) -> None:
        """`decoder` is that of a value; `mode` is that of new files."""
        self.path = path
        self._mode = mode
        self._decode = decoder.decode
        self._position = _Position()
        self._newest = path.with_name(f"{path.name}.newest")

    def read(self) -> list[T]:
        """Return what was appended since the last time.

        Raises:
            DamagedError: the file is not what was written; the text says where.
            OSError: it cannot be read.
        """
        # Others may append meanwhile: then the log has more lines than this says, never fewer.
        newest = self._read_newest()
        try:
            with disk.open_regular(self.path) as file:
                return self._read(file, newest)
        except FileNotFoundError:
            if newest.entries or self._position.entries:
                raise DamagedError("it is missing") from None
            return []

    def append(self, value: T) -> list[T]:
        """Append a value, and return what others have appended before it.

        It is on the disk when this returns.

        Raises:
            DamagedError: the file is not what was written.
            OSError: the disk does not take it; then nothing has changed.
        """
        newest = self._read_newest()
        with os.fdopen(self._open(), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = self._read(file, newest)
            start = self._position.end
            raw = msgspec.json.encode(value)
            sha256 = _chain(self._position.sha256, raw)
            line = msgspec.json.encode(_Line(sha256, msgspec.Raw(raw))) + b"\n"
            try:
                file.truncate(start)  # a power cut may have left part of a line
                write_line(file, start, line)
                disk.sync(self.path.parent)
            except OSError:
                with suppress(OSError):
                    file.truncate(start)
                raise
            self._position = _Position(start + len(line), self._position.entries + 1, sha256)
            with suppress(OSError):  # the line is written; this can be behind
                newest = _Newest(self._position.entries, sha256)
                checksums.write_record(self._newest, newest, mode=self._mode)
        return found

    def _read_newest(self) -> _Newest:
        """How many lines there must be. If this file is damaged, the log has to speak for itself:
        it says the same unless both are damaged.
        """
        with suppress(DamagedError):
            return checksums.read_record(self._newest, _Newest) or _Newest()
        return _Newest()

    def _read(self, file: BinaryIO, newest: _Newest) -> list[T]:
        end, entries, sha256 = self._position
        size = os.fstat(file.fileno()).st_size
        if size > _MOST:
            raise DamagedError(f"it has more than {_MOST} bytes")
        if size < end:
            raise DamagedError(f"it was cut off after {size} bytes")
        file.seek(end)
        content = file.read(size - end)
        *lines, _ = content.split(b"\n")
        found: list[T] = []
        for line in lines:
            entries += 1
            end += len(line) + 1
            try:
                entry = msgspec.json.decode(line, type=_Line)
                sha256 = _chain(sha256, bytes(entry.value))
                if entry.sha256 != sha256:
                    raise DamagedError("its checksum does not match")
                if entries == newest.entries and newest.sha256 != sha256:
                    raise DamagedError("it is not the one that was written last")
                found.append(self._decode(entry.value))
            except (ValueError, UnicodeDecodeError) as error:
                raise DamagedError(f"line {entries}: {error}") from error
        if entries < newest.entries:
            raise DamagedError(f"it has {entries} lines of {newest.entries}")
        self._position = _Position(end, entries, sha256)
        return found

    def _open(self) -> int:
        """Open the log for reading and writing; OSError also for a pipe or a device."""
        with suppress(FileExistsError):
            made = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._mode)
            disk.give_to_owner(made, self.path.parent)
            return made
        there = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(there).st_mode):
            os.close(there)
            raise OSError(errno.EINVAL, "it is a pipe or a device")
        return there


def _chain(before: str, raw: bytes) -> str:
    return checksums.digest(before.encode() + raw)


def write_line(file: BinaryIO, start: int, data: bytes) -> None:
    """Write a line at a place of an unbuffered file, through to the disk."""
    file.seek(start)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())
