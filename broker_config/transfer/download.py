"""Receiving one blob: which chunks to ask for, and a partial file that survives the process. No threads, no clock."""

import errno
import hashlib
import os
import random
from contextlib import suppress
from io import FileIO
from pathlib import Path

from broker_config.protocol.errors import PeerError
from broker_config.protocol.messages import Manifest
from broker_config.transfer.blob_store import BlobStore

WINDOW = 4 << 20  # bytes asked for and not yet received, at most
FIRST_ROOM = 1  # chunks asked for at first; each that arrives makes room for one more
MAX_ROOM = 1024  # chunks: what a Want can carry
PATIENCE = 1.0  # seconds of silence after which chunks count as lost, at least
LONGEST_PATIENCE = 60.0  # on a way that has shown to be slow
LONGEST_SILENCE = 5.0  # a holder that says nothing is asked at least this often


class Download:
    """The receiver's side of one transfer. Times are seconds of any monotonic clock.

    Several askers share what the holder sends. Until something comes, each asks for one chunk, all for the same one: it
    tells the holder from then on what is under way. Then they ask in random order, since they had better want different
    ones. The partial file holds the blob and after it one byte per chunk: 1 if the chunk is there. It is open only
    while it is written to: any number of transfers may wait.
    """

    def __init__(self, manifest: Manifest, store: BlobStore, window: int = WINDOW):
        self.manifest = manifest
        self.window = window
        self.refused = 0  # chunks of a wrong index or length
        self.newest = -1  # the chunk that came last; -1: none since asking began, or began anew
        self.unanswered = 0  # how often nothing came for too long, in a row
        self._store = store
        self._count = -(-manifest.size // manifest.chunk_size)
        self._partial = store.incoming / f"{manifest.digest}-{manifest.node}-{manifest.size}-{manifest.chunk_size}"
        with store.writing():
            self._partial.touch()
            with self._open() as file:
                self._have = self._read_marks(file)
                file.truncate(manifest.size + self._count)
        self.resumed = any(self._have)
        self._left = self._have.count(0)
        self._heard = 0.0  # when the last chunk came, or was asked for
        self._silent_since = 0.0  # likewise, but not when it was asked for again
        self._asked: set[int] = set()
        self._given_up: set[int] = set()  # asked for in vain; but they may only be late
        self._unasked = [index for index, there in enumerate(self._have) if not there]
        random.shuffle(self._unasked)
        self.restart()

    def _open(self) -> FileIO:
        return self._partial.open("r+b", buffering=0)

    def _read_marks(self, file: FileIO) -> bytearray:
        file.seek(self.manifest.size)
        marks = file.read()
        return bytearray(marks if len(marks) == self._count else self._count)

    def restart(self) -> None:
        """Begin asking anew: the connection was lost, and with it all that was under way; or it is our turn again."""
        self._forget_asked()
        self._patience = PATIENCE
        self.unanswered = 0

    def _forget_asked(self) -> None:
        self._unasked[:0] = self._asked  # asked for again last
        self._given_up |= self._asked
        self._asked.clear()
        self._room = FIRST_ROOM
        self.newest = -1

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return self._left == 0

    @property
    def received(self) -> int:
        """Bytes that are there."""
        return min(self.manifest.size, (self._count - self._left) * self.manifest.chunk_size)

    def wants(self, now: float) -> tuple[int, ...]:
        """Return the chunks to ask for now; they count as asked for from now on."""
        if self._asked and now - self._heard > self._patience:
            self._forget_asked()
            self.unanswered += 1
            self._patience = max(self._patience, min(2 * self._patience, LONGEST_SILENCE))
        room = min(self._room, MAX_ROOM, max(1, self.window // self.manifest.chunk_size))
        if self.complete or 2 * len(self._asked) > room:  # rather a few large Wants than many small ones
            return ()
        if not self._asked:
            self._heard = now
            self._silent_since = self._silent_since if self.unanswered else now
        chosen = self._any(room - len(self._asked)) if self.newest >= 0 else self._first()
        self._asked.update(chosen)
        self._given_up.difference_update(chosen)
        return tuple(chosen)

    def _any(self, most: int) -> list[int]:
        chosen: list[int] = []
        while self._unasked and len(chosen) < most:
            index = self._unasked.pop()
            if not self._have[index]:
                chosen.append(index)
        return chosen

    def _first(self) -> list[int]:
        missing = (index for index, there in enumerate(self._have) if not there)
        first = min(missing, key=lambda index: (index in self._given_up, index))
        self._unasked.remove(first)
        return [first]

    def receive(self, index: int, data: bytes | memoryview, now: float) -> None:
        """Take in a chunk, asked for or not; a duplicate is ignored, an impossible one is ignored and counted.

        EdgeNodeError if the disk does not take it.
        """
        offset = index * self.manifest.chunk_size
        if index >= self._count or len(data) != min(self.manifest.chunk_size, self.manifest.size - offset):
            self.refused += 1
            return
        if self._asked:
            waited = now - (self._silent_since if index in self._given_up else self._heard)
            self._patience = min(max(2 * waited, 0.9 * self._patience, PATIENCE), LONGEST_PATIENCE)
        self._heard = self._silent_since = now
        self._room = self._room + 1 if index in self._asked else max(1, self._room - 1)
        self._asked.discard(index)
        if self.newest < 0:  # what else we asked for may have been sent before we listened
            self._unasked[:0] = self._asked
            self._asked.clear()
        self.newest, self.unanswered = index, 0
        if self._have[index]:
            return
        with self._store.writing(), self._open() as file:
            _write(file, offset, data)
            _write(file, self.manifest.size + index, b"\1")
        self._have[index] = 1
        self._left -= 1

    def finish(self) -> Path:
        """Move the complete blob into the store and return its path there.

        If the bytes are not the manifest's they are forgotten, and PeerError names the holder.
        """
        with self._store.writing(), self._open() as file:
            file.truncate(self.manifest.size)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.manifest.digest:
            self.discard()
            raise PeerError(self.manifest.node, "its blob does not match its digest", self.manifest.round)
        return self._store.adopt(self._partial, digest)

    def discard(self) -> None:
        """Give up, and forget what has arrived; on a disk that lets nothing be removed it stays."""
        with suppress(OSError):
            self._partial.unlink()


def _write(file: FileIO, offset: int, data: bytes | memoryview) -> None:
    file.seek(offset)
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
