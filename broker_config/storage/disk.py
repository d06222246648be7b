"""Durable writes to a disk that may be full or read-only:
after a power cut a file has its old or its new content.
"""

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from broker_config.protocol.errors import EdgeNodeError, UsageError, explain_scarcity

_PROBE = 1 << 16  # bytes
_GLANCE = 0.05  # seconds; who asks whether a folder is locked holds a lock for an instant


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into an EdgeNodeError that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise UsageError(
                f"{folder} cannot be a folder: {reason}", "name another, or remove that file"
            ) from error
        raise explain_scarcity(error) or EdgeNodeError(
            f"cannot write to {folder}: {reason}", "free some space there, or make it writable"
        ) from error


def check_file_writable(path: Path) -> None:
    """Raise EdgeNodeError, which names it, unless the file can be written.

    Nothing is left that was not there.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and a file is to be written there", "name a file")
    check_writable(path.absolute().parent)


def check_writable(folder: Path) -> None:
    """Raise EdgeNodeError, which names the folder, unless files can be written there.

    It need not exist, nor does then.

    To be called at the start: else a full disk is noticed when there is something to lose.
    UsageError if another process uses the state folder.
    """
    if is_locked(folder):
        with lock_folder(folder):  # names the process, unless it has just ended
            pass
    with writing(folder):
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; OSError also for a pipe or a device,
    at which reading could wait for ever.
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    file = open(path, "rb", opener=open_at_once)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device")
    return file


def read_regular(path: Path, most: int = 1 << 30) -> bytes:
    """Return a file's content; OSError also for a pipe, a device, or more than `most` bytes.

    For files that others may put there: they cannot keep us waiting, or fill the memory.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return content


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a new file beside `path`,
    and move that to `path` once it is safe on the disk.

    The new file has one name, so that a killed process leaves at most one behind. Where two
    processes may replace the same file, hold `lock_briefly` around it.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    write(scratch)
    move_durably(scratch, path)


def replace_bytes(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace the content of `path` by `data`.

    With `mode` 0o600 nobody else can read it at any moment.
    """

    def write(scratch: Path) -> None:
        scratch.unlink(missing_ok=True)  # one that a killed process left may have another mode
        with open(
            scratch, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)
        ) as file:
            give_to_owner(file.fileno(), path.parent)
            file.write(data)

    replace(path, write)


def give_to_owner(descriptor: int, folder: Path) -> None:
    """Give a file that root has just made to the owner of its folder.

    A command that an administrator runs writes into the folder of a service, which could not read
    its answer otherwise. The file must be new: root would give away a link's target.
    """
    owner = folder.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def make_private(folder: Path) -> None:
    """Make a folder for its owner alone, unless it exists. One that root makes is given to the
    owner of the folder in which it lies.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        folder.mkdir(exist_ok=True)  # raises if it is a file
        return
    except FileNotFoundError:
        make_private(folder.parent)
        make_private(folder)
        return
    # whoever owns the folder around it may have put something else in its place
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        give_to_owner(descriptor, folder.parent)
    finally:
        os.close(descriptor)


def move_durably(scratch: Path, path: Path) -> None:
    """Move a complete file to `path`: its content is synced to the disk first, then its name."""
    sync(scratch)
    scratch.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_briefly(lock: Path) -> Iterator[None]:
    """Wait until no other thread or process changes what this file protects.

    It is made if need be, and stays. Locking it again inside waits for ever. OSError if it cannot
    be opened.
    """
    with suppress(FileExistsError):
        made = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)
        give_to_owner(made, lock.parent)
        os.close(made)
    descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(
    folder: Path, remedy: str = "stop that process, or choose another --state folder"
) -> Iterator[None]:
    """Keep other processes from using a state folder,
    which is made for its owner alone if it does not exist.

    Raises:
        UsageError: another process uses it.
        EdgeNodeError: it cannot be written.
    """
    with writing(folder):
        # models and contributions are a plant's secrets
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_file(folder / "lock", f"the state folder {folder}", remedy):
        yield


@contextmanager
def lock_file(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Keep other processes from using `what` a file stands for.

    Raises:
        UsageError: another process uses it.
        EdgeNodeError: the file cannot be written.
    """
    with writing(path.parent):
        lock = path.open("a+")
    with lock:
        if not (_try_lock(lock) or _try_lock(lock, after=_GLANCE)):
            lock.seek(0)
            raise UsageError(f"{what} is used by process {lock.read().strip() or '?'}", remedy)
        with writing(path.parent):
            lock.truncate(0)
            # nothing is left for `close`, whose error names no file
            os.write(lock.fileno(), b"%d" % os.getpid())
        yield


def _try_lock(lock: TextIO, after: float = 0.0) -> bool:
    time.sleep(after)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(folder: Path) -> bool:
    """Whether a process uses a state folder, as far as can be told on this machine."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
