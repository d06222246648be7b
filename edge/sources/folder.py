"""A watched folder: the image files that lie in it, and those that arrive."""

import asyncio
import logging
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from watchfiles import awatch

from broker_config.errors import UsageError
from edge.images import SUFFIXES
from edge.line import Frame
from edge.verdict import Failure, Verdict

QUIET = 0.5  # seconds without a change after which a file counts as completely written
SWEEP = 5.0  # seconds between looks at the whole folder: network shares announce nothing, full kernel queues drop
_TICK = 100  # milliseconds between looks at files that are still being written

_log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"):
    """`[[sources]] kind = "folder"`: image files as they appear."""

    path: str


class _Stamp(NamedTuple):
    """Tells one content of a file from the next."""

    modified: int  # nanoseconds
    size: int  # bytes


class Folder:
    """Brings each image file in `folder` once it is complete; the files stay where they are.

    Complete means: neither size nor modification time changed for QUIET seconds, however the file came (written, copied
    or renamed into place). A file whose size or time changes later is brought again. Sub-folders and names that
    begin with a dot are left alone. Nothing is remembered across a restart: all files in the folder are brought anew.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} to watch", "make it, or name another")
        self.name = f"folder {folder}"
        self._folder = folder
        self._brought: dict[Path, _Stamp] = {}
        self._growing: dict[Path, tuple[_Stamp, float]] = {}  # what the file was like, and since when
        self._swept = -SWEEP
        self._present = True

    async def frames(self, stop: asyncio.Event) -> AsyncIterator[Frame]:
        """Each complete image once, oldest first, named by its file name; ends soon after `stop` is set."""
        ticks = awatch(
            self._folder,
            watch_filter=None,
            recursive=False,
            debounce=_TICK,
            rust_timeout=_TICK,
            yield_on_timeout=True,
            stop_event=stop,
        )
        async for changes in ticks:
            for path in await asyncio.to_thread(
                self._complete, {self._folder / Path(path).name for _, path in changes}
            ):
                if stop.is_set():
                    return
                yield Frame(path.name, path, self.name)

    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:
        """The file stays where it is."""

    def _complete(self, changed: set[Path]) -> list[Path]:
        """The files that have become complete, oldest first, given those that `changed` since the last call."""
        now = time.monotonic()
        if now - self._swept >= SWEEP:
            self._swept = now
            changed |= self._sweep()
        for path in changed | self._growing.keys():
            self._look(path, now)
        complete = [(stamp, path) for path, (stamp, since) in self._growing.items() if now - since >= QUIET]
        for stamp, path in complete:
            self._brought[path] = stamp
            del self._growing[path]
        return [path for _, path in sorted(complete)]

    def _look(self, path: Path, now: float) -> None:
        """Note how `path` grows, unless it was brought as it is, is no image, or is gone."""
        stamp = _stamp(path)
        if stamp is None or stamp == self._brought.get(path):
            self._growing.pop(path, None)
        elif path not in self._growing or self._growing[path][0] != stamp:
            self._growing[path] = (stamp, now)

    def _sweep(self) -> set[Path]:
        """All files in the folder; forgets those that are gone. A folder out of reach is waited for."""
        try:
            present = set(self._folder.iterdir())
        except OSError as error:
            if self._present:
                _log.error("cannot look into %s: %s; still trying", self._folder, error.strerror)
            self._present = False
            return set()
        self._present = True
        self._brought = {path: stamp for path, stamp in self._brought.items() if path in present}
        return present


def _stamp(path: Path) -> _Stamp | None:
    """The state of an image file; None for anything else."""
    if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None
