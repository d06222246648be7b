"""Checksums (SHA-256) by which damaged files are noticed: inside a record,
or of a folder's files in `SHA256SUMS`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from broker_config.protocol.errors import explain_scarcity
from broker_config.storage import disk

# as sha256sum writes it, so `sha256sum -c SHA256SUMS` checks the folder by hand
SUMS = "SHA256SUMS"
T = TypeVar("T")


class DamagedError(ValueError):
    """A file is not what was written; the text says briefly what is wrong."""


class _Record(msgspec.Struct, frozen=True):
    sha256: str
    value: msgspec.Raw


def write_record(path: Path, value: object, *, mode: int = 0o600) -> None:
    """Replace a file durably by `value` as JSON, with a checksum."""
    data = msgspec.json.encode(value)
    disk.replace_bytes(
        path, msgspec.json.encode(_Record(digest(data), msgspec.Raw(data))), mode=mode
    )


def read_record(path: Path, expect: type[T]) -> T | None:
    """The value that was written to a file; None if there is none.

    Raises:
        DamagedError: it is another.
        OSError: it cannot be read.
        EdgeNodeError: not now, since too much is open: nothing is wrong with the file.
    """
    try:
        record = msgspec.json.decode(disk.read_regular(path), type=_Record)
        if record.sha256 != digest(bytes(record.value)):
            raise DamagedError("its checksum does not match")
        return msgspec.json.decode(record.value, type=expect)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain_scarcity(error) or error from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedError(str(error)) from error


def write_copies(paths: Sequence[Path], value: object) -> None:
    """Replace each copy of a file as `write_record` does, one after the other.

    Damage to one copy, or an older one in its place, then undoes nothing.
    """
    for path in paths:
        write_record(path, value)


def read_copies(paths: Sequence[Path], expect: type[T]) -> list[T]:
    """Return the values of those copies of a file that are there and intact.

    They differ where one was replaced by an older one, or a process was killed between them.

    Raises:
        DamagedError: one is damaged, and none is intact.
        OSError, EdgeNodeError: as `read_record`.
    """
    found = list[T]()
    damaged = None
    for path in paths:
        try:
            value = read_record(path, expect)
        except DamagedError as error:
            damaged = error
        else:
            found += [] if value is None else [value]
    if damaged and not found:
        raise damaged
    return found


def digest(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with disk.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_unchanged(path: Path, digest: str) -> bytes | None:
    """A file's content if that has this SHA-256; None if it is gone or has changed."""
    try:
        with disk.open_regular(path) as file:
            content = file.read()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == digest else None


def sums(digests: Mapping[str, str]) -> bytes:
    """The content of a SHA256SUMS, of digests by file name."""
    return "".join(f"{value}  {name}\n" for name, value in sorted(digests.items())).encode()


def lists(folder: Path, name: str) -> bool:
    """Whether the folder's SHA256SUMS speaks of a file."""
    path = folder / SUMS
    return path.exists() and f"  {name}\n".encode() in disk.read_regular(path)


def verify(folder: Path, *names: str) -> None:
    """Compare files with the folder's SHA256SUMS; without that, nothing is known of them.

    Raises:
        DamagedError: one is missing, or is not what was written.
        OSError: one cannot be read.
    """
    path = folder / SUMS
    if not path.exists():
        return
    lines = disk.read_regular(path).splitlines()
    for name in names:
        try:
            found = digest_of(folder / name)
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        if f"{found}  {name}".encode() not in lines:
            raise DamagedError(f"the checksum of {name} in {SUMS} does not match")
