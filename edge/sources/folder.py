"""A watched folder: the image files in it, and those that arrive."""

import asyncio
import contextlib
import logging
import os
import stat
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct
from watchfiles import awatch

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.config.instance import Instance
from edge.inference.image_decoding import OTHER_SUFFIXES, SUFFIXES, drop_annotated
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Frame
from edge.sources.source import Access

if TYPE_CHECKING:
    from edge.sources.source_checkpoint import SourceCheckpoint

QUIET = 0.5  # seconds without a change after which a file counts as completely written
# seconds between scans of the whole folder: network shares report nothing, full kernel queues drop
SWEEP = 5.0
_TICK = 100  # milliseconds between checks of files that are still being written
_MOVE = "move:"

_log = logging.getLogger(__name__)


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"
):
    """`[[sources]] kind = "folder"`: image files as they appear."""

    path: str
    recursive: bool = False  # also those in its sub-folders
    # what happens to a file that was inspected
    after: Annotated[str, Meta(pattern="^(keep|delete|move:.+)$")] = "keep"

    def open_source(self, instance: Instance) -> "Folder":
        """Open the source."""
        # Only some sources need SQLite
        from edge.sources.source_checkpoint import SourceCheckpoint  # noqa: PLC0415

        return Folder(self, SourceCheckpoint(instance.state, source_name(self)))

    def access(self) -> Access:
        """Return the access to the folder, and to the one into which its files are moved."""
        folder = Path(self.path)
        if self.after == "keep":
            return Access(reads=(folder,))
        if self.after == "delete":
            return Access(writes=(folder,))
        return Access(writes=(folder, folder / self.after.removeprefix("move:")))


class _Stamp(NamedTuple):
    """Modification time and size, which distinguish one content of a file from the next."""

    modified: int  # nanoseconds
    size: int  # bytes

    def to_bytes(self) -> bytes:
        """Its form in the checkpoint."""
        return f"{self.modified} {self.size}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "_Stamp":
        """The stamp in a checkpoint; one that no file has if that is damaged."""
        try:
            modified, size = map(int, data.split())
        except ValueError:
            return cls(-1, -1)
        return cls(modified, size)


class Folder:
    """Brings each image file in a folder once it is complete.

    Complete means: neither size nor modification time changed for QUIET seconds, however the file
    came (written, copied or renamed into place). A file whose size or time changes later is brought
    again. Annotated pictures, and files and sub-folders whose names begin with a dot, are ignored.
    The checkpoint says which files were inspected, across restarts; one is inspected twice only if
    the process is killed between storing its outcome and updating the checkpoint.
    """

    def __init__(self, settings: Settings, checkpoint: "SourceCheckpoint") -> None:
        """UsageError when there is no such folder, or inspected files cannot be moved as the
        settings say.
        """
        self._folder = Path(settings.path).resolve()
        if not self._folder.is_dir():
            raise UsageError(
                f"there is no folder {settings.path} to watch", "make it, or name another"
            )
        self.name = source_name(settings)
        self._checkpoint = checkpoint
        self._recursive = settings.recursive
        self._delete = settings.after == "delete"
        self._done_folder = self._find_done_folder(settings.after)
        inspected = checkpoint.all().items()
        self._brought = {
            self._folder / os.fsdecode(key): _Stamp.from_bytes(value) for key, value in inspected
        }
        self._growing: dict[Path, tuple[_Stamp, float]] = {}  # the file's state, and since when
        self._in_hand: deque[tuple[Path, _Stamp]] = deque()
        self._swept = -SWEEP
        self._ignored: set[str] = set()  # suffixes of images that cannot be read
        # inspected before a restart, perhaps not put away yet
        self._left = list(self._brought.items())

    def _find_done_folder(self, after: str) -> Path | None:
        if not after.startswith(_MOVE):
            return None
        place = self._folder / after.removeprefix(_MOVE)
        try:
            place.mkdir(parents=True, exist_ok=True)
            if place.stat().st_dev == self._folder.stat().st_dev:
                return place
            reason = "it is on another disk"
        except OSError as error:
            reason = error.strerror or str(error)
        raise UsageError(
            f"inspected files cannot be moved to {place}: {reason}",
            f"name another folder on the disk of {self._folder}",
        )

    async def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        """Each complete image once, oldest first, named by its path in the folder;
        ends soon after `stop` is set.

        EdgeNodeError when the folder is out of reach; it may then be called again.
        """
        left = self._left
        self._left = []
        await asyncio.to_thread(self._put_all_away, left)
        async for changed in self._changes(stop):
            for path, stamp in await asyncio.to_thread(self._complete, changed):
                if stop.is_set():
                    return
                self._brought[path] = stamp
                self._in_hand.append((path, stamp))
                crashes = self._checkpoint.begin(self._key(path), stamp.to_bytes())
                yield Frame(self._name_of(path), path, self.name, crashes)

    async def _changes(self, stop: asyncio.Event) -> AsyncGenerator[set[Path]]:
        """Paths that have changed since the last tick, as far as the system reports them."""
        while not stop.is_set():
            try:
                async for changes in awatch(
                    self._folder,
                    watch_filter=None,
                    recursive=self._recursive,
                    debounce=_TICK,
                    rust_timeout=_TICK,
                    yield_on_timeout=True,
                    stop_event=stop,
                ):
                    yield {Path(path) for _, path in changes}
            # watchfiles has several: names that are not UTF-8, too many watches
            except Exception as error:
                _log.debug("cannot be told of changes in %s: %s", self._folder, error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), QUIET)
                self._swept = -SWEEP
                yield set()

    # They come in order
    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:
        """Record that the file was inspected, and put it away."""
        path, stamp = self._in_hand.popleft()
        self._checkpoint.put(self._key(path), stamp.to_bytes())
        self._put_away(path, stamp)

    def _put_all_away(self, inspected: Iterable[tuple[Path, _Stamp]]) -> None:
        for path, stamp in inspected:
            self._put_away(path, stamp)

    def _put_away(self, path: Path, stamp: _Stamp) -> None:
        """Move or delete an inspected file, if that is wanted and it is still what was
        inspected.
        """
        if not (self._delete or self._done_folder) or _stamp(path) != stamp:
            return
        try:
            if self._done_folder:
                path.rename(_free(self._done_folder / path.name))
            else:
                path.unlink()
        except OSError as error:
            _log.error("cannot put away %s: %s; it stays where it is", path, error.strerror)

    def _complete(self, changed: set[Path]) -> list[tuple[Path, _Stamp]]:
        """The files that have become complete, oldest first,
        given those that `changed` since the last call.
        """
        now = time.monotonic()
        if now - self._swept >= SWEEP:
            self._swept = now
            changed = changed | self._sweep()
        for path in changed | self._growing.keys():
            self._track(path, now)
        complete = [
            (path, stamp) for path, (stamp, since) in self._growing.items() if now - since >= QUIET
        ]
        for path, _ in complete:
            del self._growing[path]
        images = set(drop_annotated(path for path, _ in complete))
        self._brought |= {path: stamp for path, stamp in complete if path not in images}
        return sorted(
            (each for each in complete if each[0] in images),
            key=lambda each: (each[1].modified, each[0]),
        )

    def _track(self, path: Path, now: float) -> None:
        """Record the state of `path`, unless it was brought as it is, is no image, or is gone."""
        self._note_ignored(path)
        stamp = _stamp(path) if self._is_inside(path) else None
        if stamp is None or stamp == self._brought.get(path):
            self._growing.pop(path, None)
        elif path not in self._growing or self._growing[path][0] != stamp:
            self._growing[path] = (stamp, now)

    def _note_ignored(self, path: Path) -> None:
        """Say once for each kind of image that cannot be read that there are such files."""
        suffix = path.suffix.lower()
        if suffix in OTHER_SUFFIXES and suffix not in self._ignored and self._is_inside(path):
            self._ignored.add(suffix)
            _log.warning(
                "%s and other %s files in %s are ignored: have images saved as one of %s",
                path.name,
                suffix,
                self._folder,
                " ".join(SUFFIXES),
            )

    def _is_inside(self, path: Path) -> bool:
        if self._done_folder and path.is_relative_to(self._done_folder):
            return False
        inside = path.relative_to(self._folder).parts
        return len(inside) == 1 or (
            self._recursive and not any(part.startswith(".") for part in inside)
        )

    def _sweep(self) -> set[Path]:
        """All files in the folder; those that are gone leave the checkpoint.

        EdgeNodeError when it is out of reach.
        """
        try:
            present = set(self._files())
        except OSError as error:
            raise self._out_of_reach(error.strerror or str(error)) from error
        # An empty folder may be a network share that is not mounted.
        if present and (gone := self._brought.keys() - present):
            self._checkpoint.remove(self._key(path) for path in gone)
            for path in gone:
                del self._brought[path]
        return present

    def _files(self) -> Iterator[Path]:
        if not self._recursive:
            yield from self._folder.iterdir()
            return
        for place, folders, files in os.walk(self._folder, onerror=_fail):
            folders[:] = [each for each in folders if not each.startswith(".")]
            yield from (Path(place) / each for each in files)

    def _out_of_reach(self, reason: str) -> EdgeNodeError:
        return EdgeNodeError(
            f"cannot look into {self._folder}: {reason}", "check the disk or the network share"
        )

    def _key(self, path: Path) -> bytes:
        return os.fsencode(path.relative_to(self._folder))

    def _name_of(self, path: Path) -> str:
        # a name that is not UTF-8 cannot go into JSON
        return self._key(path).decode(errors="replace")


def source_name(settings: Settings) -> str:
    """Name of the source, in outcomes, logs and its checkpoint."""
    return f"folder {settings.path}"


def _stamp(path: Path) -> _Stamp | None:
    """The state of an image file; None for anything else."""
    if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _free(path: Path) -> Path:
    """This path, or a numbered one that does not exist yet:
    a camera may write the same name every time, for years.
    """

    def numbered(number: int) -> Path:
        return path.with_stem(f"{path.stem}-{number}")

    if not path.exists():
        return path
    free = 1
    while numbered(free).exists():
        free *= 2
    return numbered(
        bisect_left(
            range(free), True, free // 2 + 1, key=lambda number: not numbered(number).exists()
        )
    )


def _fail(error: OSError) -> None:
    raise error
