"""Download of one blob: which chunks to request, and a partial file that survives the process.

No threads, no clock.
"""

import errno
import hashlib
import os
from contextlib import suppress
from io import FileIO
from itertools import chain, islice
from pathlib import Path

from broker_config.protocol.errors import PeerError
from broker_config.protocol.messages import Manifest
from broker_config.transfer.blob_store import BlobStore

WINDOW = 4 << 20  # bytes requested and not yet received, at most
MAX_CHUNKS = 1024  # outstanding, at most: what a Want can carry
MIN_TIMEOUT = 1.0  # seconds without a chunk after which those requested count as lost, at least
MAX_TIMEOUT = 60.0  # likewise, on a connection that has proved to be slow
MAX_RETRY_INTERVAL = 5.0  # seconds: an unresponsive holder is asked at least this often


class Download:
    """The receiver's side of one transfer. Times are seconds of any monotonic clock.

    Several askers share what the holder sends. Until the first chunk arrives, each requests one
    chunk, all the same one: from then on it tells the holder what is in flight. Then each requests
    what follows the newest chunk, and at the end begins again: what the early ones have had is sent
    to the late ones when the early ones have left.

    The partial file holds the blob and after it one byte per chunk: 1 if the chunk is there. It is
    open only while it is written to: any number of downloads may wait.
    """

    def __init__(self, manifest: Manifest, store: BlobStore, window: int = WINDOW):
        self.manifest = manifest
        self.window = window
        self.refused = 0  # chunks of a wrong index or length
        # the chunk that arrived last; -1: none since requests began, or began anew
        self.newest = -1
        self.unanswered = 0  # timeouts in a row
        self._store = store
        self._count = -(-manifest.size // manifest.chunk_size)
        self._partial = (
            store.incoming
            / f"{manifest.digest}-{manifest.node}-{manifest.size}-{manifest.chunk_size}"
        )
        with store.writing():
            self._partial.touch()
            with self._open() as file:
                self._received = self._read_marks(file)
                file.truncate(manifest.size + self._count)
        self.resumed = any(self._received)
        self._left = self._received.count(0)
        self._last_chunk = 0.0  # when the last chunk arrived, or was requested
        self._silent_since = 0.0  # likewise, but not when it was requested again
        self._requested: set[int] = set()
        self._overdue: set[int] = set()  # requested without an answer; but they may only be late
        self.restart()

    def _open(self) -> FileIO:
        return self._partial.open("r+b", buffering=0)

    def _read_marks(self, file: FileIO) -> bytearray:
        file.seek(self.manifest.size)
        marks = file.read()
        marked_or_count = marks if len(marks) == self._count else self._count
        return bytearray(marked_or_count)

    def restart(self) -> None:
        """Begin requests anew: after the loss of a connection, and of all that was in flight,
        or after waiting.
        """
        self._forget_requested()
        self._timeout = MIN_TIMEOUT
        self.unanswered = 0

    def _forget_requested(self) -> None:
        self._overdue |= self._requested
        self._requested.clear()
        self.newest = -1

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return self._left == 0

    @property
    def received(self) -> int:
        """Bytes that are there."""
        return min(self.manifest.size, (self._count - self._left) * self.manifest.chunk_size)

    def chunks_to_request(self, now: float) -> tuple[int, ...]:
        """Return the chunks to request now; they count as requested from now on."""
        if self._requested and now - self._last_chunk > self._timeout:
            self._forget_requested()
            self.unanswered += 1
            self._timeout = max(self._timeout, min(2 * self._timeout, MAX_RETRY_INTERVAL))
        most = (
            min(MAX_CHUNKS, max(1, self.window // self.manifest.chunk_size))
            if self.newest >= 0
            else 1
        )
        # rather a few large Wants than many small ones
        if self.complete or 2 * len(self._requested) > most:
            return ()
        if not self._requested:
            self._last_chunk = now
            self._silent_since = self._silent_since if self.unanswered else now
        chosen = (
            self._next_chunks(most - len(self._requested))
            if self.newest >= 0
            else self._first_chunk()
        )
        self._requested.update(chosen)
        self._overdue.difference_update(chosen)
        return tuple(chosen)

    def _next_chunks(self, most: int) -> list[int]:
        order = chain(range(self.newest + 1, self._count), range(self.newest))
        return list(
            islice(
                (
                    each
                    for each in order
                    if not self._received[each] and each not in self._requested
                ),
                most,
            )
        )

    def _first_chunk(self) -> list[int]:
        missing = (index for index, there in enumerate(self._received) if not there)
        return [min(missing, key=lambda index: (index in self._overdue, index))]

    def receive(self, index: int, data: bytes | memoryview, now: float) -> None:
        """Store a chunk, requested or not; a duplicate is ignored,
        an impossible one is ignored and counted.

        EdgeNodeError if the disk does not take it.
        """
        offset = index * self.manifest.chunk_size
        if index >= self._count or len(data) != min(
            self.manifest.chunk_size, self.manifest.size - offset
        ):
            self.refused += 1
            return
        if self._requested:
            silent_since = self._silent_since if index in self._overdue else self._last_chunk
            waited = now - silent_since
            self._timeout = min(max(2 * waited, 0.9 * self._timeout, MIN_TIMEOUT), MAX_TIMEOUT)
        self._last_chunk = self._silent_since = now
        self._requested.discard(index)
        if self.newest < 0:  # what else we requested may have been sent before we listened
            self._requested.clear()
        self.newest = index
        self.unanswered = 0
        if self._received[index]:
            return
        with self._store.writing(), self._open() as file:
            _write(file, offset, data)
            _write(file, self.manifest.size + index, b"\1")
        self._received[index] = 1
        self._left -= 1

    def finish(self) -> Path:
        """Move the complete blob into the store and return its path there.

        If the bytes do not match the manifest they are deleted, and PeerError names the holder.
        """
        with self._store.writing(), self._open() as file:
            file.truncate(self.manifest.size)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.manifest.digest:
            self.discard()
            raise PeerError(
                self.manifest.node, "its blob does not match its digest", self.manifest.round
            )
        return self._store.adopt(self._partial, digest)

    def discard(self) -> None:
        """Give up and delete what has arrived, unless the disk does not allow it."""
        with suppress(OSError):
            self._partial.unlink()


def _write(file: FileIO, offset: int, data: bytes | memoryview) -> None:
    file.seek(offset)
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
