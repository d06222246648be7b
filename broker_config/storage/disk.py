"""Writing to a disk that may be full or closed to us: a power cut leaves the old or the new, never half of it."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from broker_config.protocol.errors import EdgeNodeError, UsageError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the disk complains about into an EdgeNodeError that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EdgeNodeError(
            f"cannot write to {folder}: {reason}", "free some space there, or make it writable"
        ) from error


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a new file beside `path`, and put that in its place once it is safe on the disk."""
    scratch = path.with_name(f"{path.name}.tmp")
    write(scratch)
    settle(scratch, path)


def replace_bytes(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Let `path` hold `data`. With `mode` 0o600 nobody else can read it, at no moment."""

    def write(scratch: Path) -> None:
        scratch.unlink(missing_ok=True)  # what is left of a kill may have another mode
        with open(scratch, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file:
            file.write(data)

    replace(path, write)


def settle(scratch: Path, path: Path) -> None:
    """Move a complete file to `path`, its content and then its name safe on the disk."""
    sync(scratch)
    scratch.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def claimed(folder: Path, remedy: str = "stop that process, or choose another --state folder") -> Iterator[None]:
    """A state folder, made for its owner alone if need be, that no other process uses meanwhile.

    Raises:
        UsageError: another process uses it.
        EdgeNodeError: it cannot be written.
    """
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # models and contributions are a plant's secrets
        lock = (folder / "lock").open("a+")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UsageError(
                f"the state folder {folder} is used by process {lock.read().strip() or '?'}", remedy
            ) from None
        with writing(folder):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        yield
