"""Durable queue of outcomes for the sinks: it outlives the process,
and keeps what receivers miss while they are away.

SQLite in WAL mode: `put` hands an outcome to the operating system, so a kill does not lose it; a
second later it is safe from a power cut too. Rows hold checksums. SQLite takes a damaged
write-ahead log for a shorter one, so the newest number stands in a file of its own.
"""

import contextlib
import logging
import os
import sqlite3
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.storage.database import is_damage
from broker_config.storage.disk import lock_folder, writing
from edge.inference.outcomes import Notice, Outcome, current_time, encode_outcome, new_id
from edge.outbox.limits import Limits
from edge.outbox.outbox_file import connect, open_error, set_aside

_FILE = "outcomes.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS outcomes (seq INTEGER PRIMARY KEY, data BLOB NOT NULL, \
crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS cursors (name TEXT PRIMARY KEY, seq INTEGER NOT NULL, \
crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (one INTEGER PRIMARY KEY, id TEXT NOT NULL, place TEXT NOT NULL);
"""
_NEWEST = ""  # a cursor of no sink: it remembers the newest number after a leap
# file with the number of the last outcome
_COUNTER = "newest"
_DIGITS = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ORIGIN = "origin"  # file that is made with the outbox and never changed: a copy has another ctime
_MAINTENANCE = 1.0  # seconds between syncs: what a power cut can cost
_RETRY = 0.2  # seconds between attempts to write what waits in memory
_LOCK_TIMEOUT = 10  # milliseconds that `put` waits for another process that has locked the file
_CREDIBLE = 1_000_000_000  # numbers that may come before their milliseconds
_LEAP = 20_000  # more numbers than a power cut can cost; as milliseconds, a short time
_CHUNK = 200  # rows that are deleted at once: `put` waits for it
_MAX_WAL = 16 << 20  # bytes of the write-ahead log, about
_MAX_BUFFERED = 10_000  # outcomes in memory while the disk is full
# share of the limits, or of the memory, below which the outbox counts as no longer full
_LOW_WATER = 0.9

_log = logging.getLogger(__name__)


class _Identified(Struct):
    """An outcome's id, which is all that `contains` compares."""

    id: str = ""


class Outbox:
    """The outbox of a line with sinks.

    Each sink has a cursor: the number of the last outcome that it is done with.

    Outcomes are numbered consecutively, and no number is ever used twice: when the machine has
    started since, or the outbox was deleted, damaged or restored from a copy, the numbers leap to
    the milliseconds since 1970, or further.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        """Open or create it; EdgeNodeError when the disk does not allow that.

        Use `open_outbox`, then `set_sinks`.
        """
        self.path = folder / _FILE
        self.dropped = 0  # outcomes that some sink never got, since the start
        self.newest = 0  # the number of the last outcome
        self.id = ""  # unique to this file
        self._cursors: dict[str, int] = {}
        self._limits = limits
        self._lock = threading.Lock()  # of all that follows; held for well under a millisecond
        self._arrived = threading.Condition(self._lock)
        # in memory while the disk is full: newer than all on disk
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._failing = False  # whether the disk refused the latest write
        self._nearly_full = False  # whether more may have to be dropped soon
        self._reported = 0  # dropped outcomes that the log has been told of
        # outcomes dropped before the current overflow; None without one
        self._dropped_before: int | None = None
        self._changed = True
        self._before: int  # rows present at the start
        self._salvaged = False  # whether sinks begin with what was taken over
        with writing(folder):
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise open_error(self.path, error) from error
                kept = set_aside(self.path, error)
                self._open()
                self._salvage(kept)
            self._skip_used_numbers(folder / _COUNTER)
            self._file = self.path.stat()
            [(self._before,)] = self._db.execute("SELECT COUNT(*) FROM outcomes")
        self._added = 0  # rows, since the start
        self._reader = connect(self.path)
        self._reading = threading.Lock()
        self._ending = threading.Event()
        self._maintenance = threading.Thread(
            target=self._maintain, args=(connect(self.path),), name="outbox", daemon=True
        )

    def set_sinks(self, names: Sequence[str]) -> None:
        """Serve these sinks from now on: a new name starts with the next outcome,
        one that is gone is removed.
        """
        with self._lock:
            self._log_removed(set(self._cursors) - set(names))
            begin = 0 if self._salvaged else self.newest
            self._salvaged = False
            self._cursors = {name: self._cursors.get(name, begin) for name in names}
            self._save()
        if not self._maintenance.ident:
            self._maintenance.start()

    def put(self, outcome: Outcome) -> None:
        """Store an outcome; never raises."""
        data = encode_outcome(outcome)
        with self._arrived:
            self.newest += 1
            if self._buffer or not self._insert(self.newest, data):
                self._add_to_buffer(self.newest, data)
            self._changed = True
            self._arrived.notify_all()

    def wait(self, name: str, seconds: float, closing: threading.Event) -> bool:
        """Whether there is something for a sink; waits for it up to `seconds`,
        or until `closing` is set.
        """
        with self._arrived:
            self._arrived.wait_for(
                lambda: self.newest > self._cursors[name] or closing.is_set(), seconds
            )
            return self.newest > self._cursors[name]

    def wake(self) -> None:
        """Have every `wait` check its `closing`."""
        with self._arrived:
            self._arrived.notify_all()

    def read(self, name: str, most: int) -> list[tuple[int, bytes]]:
        """The next outcomes for a sink, at most `most`: number and JSON."""
        with self._lock:
            after = self._cursors[name]
            buffered = list(
                islice((row for row in self._buffer if row[0] > after), most)
            )  # before the disk: misses none
        with self._reading:
            found = self._reader.execute(
                "SELECT seq, data, crc FROM outcomes WHERE seq > ? ORDER BY seq LIMIT ?",
                (after, most),
            )
            rows = []
            for seq, data, crc in found:
                content = data if crc == _crc(seq, data) else b"damaged"
                rows.append((seq, content))
        last = rows[-1][0] if rows else after
        return (rows + [row for row in buffered if row[0] > last])[:most]

    def advance(self, name: str, seq: int) -> None:
        """Set a sink's cursor: it is done with all outcomes up to `seq`."""
        with self._lock:
            if name not in self._cursors:
                return  # removed meanwhile
            self._cursors[name] = seq
            self._changed = True
            if not self._failing:
                crc = _crc(seq, name.encode())
                self._execute(
                    "UPDATE cursors SET seq = ?, crc = ? WHERE name = ?", (seq, crc, name)
                )

    def pending(self, name: str) -> int:
        """Number of outcomes that a sink has not had yet."""
        with self._lock:
            return min(
                self.newest - self._cursors[name], self._before + self._added + len(self._buffer)
            )

    def contains(self, seq: int, id_: str) -> bool:
        """Whether the outcome with this number and id is stored here,
        for some sink that may still want it.
        """
        with self._lock:
            data = next((data for number, data in self._buffer if number == seq), None)
        if data is None:
            with self._reading:
                row = self._reader.execute(
                    "SELECT data FROM outcomes WHERE seq = ?", (seq,)
                ).fetchone()
            data = row[0] if row else b"{}"
        return bool(id_) and msgspec.json.decode(data, type=_Identified).id == id_

    def close(self) -> None:
        """Write everything to disk."""
        self._ending.set()
        if self._maintenance.is_alive():
            self._maintenance.join()
        if self._failing:
            self._db.execute("PRAGMA busy_timeout = 1000")
            self._flush_buffer()
        with self._lock:
            if self._buffer:
                _log.error(
                    "the outbox %s: %d outcome(s) that waited in memory are lost",
                    self.path,
                    len(self._buffer),
                )
            self._db.close()
            os.close(self._counter)
        with self._reading:
            self._reader.close()

    def _open(self) -> None:
        self._db = connect(self.path, _TABLES)
        # it waits for the disk: the maintenance thread does it
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        try:
            self._load()
        except sqlite3.Error:
            self._db.close()
            raise

    def _load(self) -> None:
        rows = self._db.execute("SELECT name, seq, crc FROM cursors").fetchall()
        if not all(crc == _crc(seq, name.encode()) for name, seq, crc in rows):
            raise sqlite3.DatabaseError("the checksum of a cursor does not match")
        self._cursors = {name: seq for name, seq, _ in rows}
        [(last,)] = self._db.execute("SELECT MAX(seq) FROM outcomes")
        self.newest = max(last or 0, *self._cursors.values(), 0)
        self._cursors.pop(_NEWEST, None)
        self._place = _place(self.path.with_name(_ORIGIN))
        found = self._db.execute("SELECT id, place FROM facts").fetchone()
        self.id, place = found or (new_id()[:8], "")
        self._moved = place != self._place
        self._db.execute(f"PRAGMA busy_timeout = {_LOCK_TIMEOUT}")

    def _salvage(self, damaged: Path) -> None:
        """Take over what can be read of a damaged outbox: sinks are given all of it,
        whatever they had.
        """
        self._salvaged = True
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(damaged)) as old,
        ):
            for seq, data, crc in old.execute("SELECT seq, data, crc FROM outcomes"):
                if crc == _crc(seq, data) and self._execute(
                    "INSERT INTO outcomes VALUES (?, ?, ?)", (seq, data, crc)
                ):
                    self.newest = max(self.newest, seq)

    def _skip_used_numbers(self, path: Path) -> None:
        """Leap if receivers may know later numbers than the newest that is found."""
        self._counter = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        digits = os.pread(self._counter, _DIGITS, 0)
        now = int(1000 * time.time())
        counted = int(digits) if digits.isdigit() else 0
        lacking = counted > self.newest
        if lacking:
            _log.error(
                "the outbox %s ends with number %d, before %d, the last that was put into it: it "
                "is damaged, or an older copy; outcomes between them that no sink had are lost, "
                "unless a newer copy is put in its place",
                self.path,
                self.newest,
                counted,
            )
        if lacking or self._moved:
            credible = counted if counted < now + _CREDIBLE else 0  # it may be what is damaged
            # many a machine starts in 1970
            self.newest = max(max(self.newest, credible) + _LEAP, now)

    def _save(self) -> bool:
        """Write everything but the outcomes in one transaction:
        a kill in between must not lose a cursor.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR REPLACE INTO facts VALUES (1, ?, ?)", (self.id, self._place)
            )
            self._db.execute("DELETE FROM cursors")
            cursors = (self._cursors | {_NEWEST: self.newest}).items()
            rows = [(name, seq, _crc(seq, name.encode())) for name, seq in cursors]
            self._db.executemany("INSERT INTO cursors VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._log_write_error(error)
            return False
        return True

    def _log_removed(self, names: Iterable[str]) -> None:
        for name in names:
            [(left,)] = self._db.execute(
                "SELECT COUNT(*) FROM outcomes WHERE seq > ?", (self._cursors[name],)
            )
            if left:
                _log.warning(
                    "%d outcome(s) that waited for %s are dropped: it is in the settings no more",
                    left,
                    name,
                )

    def _oldest_cursor(self) -> int:
        """The number up to which all sinks are done."""
        return min(self._cursors.values(), default=self.newest)

    def _execute(self, sql: str, values: Sequence[object] = ()) -> bool:
        """Write, in one transaction; False, logged once, when the disk refuses."""
        try:
            self._db.execute(sql, values)
        except sqlite3.Error as error:
            self._log_write_error(error)
            return False
        return True

    def _log_write_error(self, error: sqlite3.Error) -> None:
        if not self._failing:
            _log.error(
                "the outbox %s cannot be written: %s; outcomes wait in memory", self.path, error
            )
        self._failing = self._changed = True

    def _insert(self, seq: int, data: bytes) -> bool:
        if not self._execute("INSERT INTO outcomes VALUES (?, ?, ?)", (seq, data, _crc(seq, data))):
            return False
        os.pwrite(self._counter, b"%0*d" % (_DIGITS, seq), 0)
        self._added += 1
        return True

    def _add_to_buffer(self, seq: int, data: bytes) -> None:
        if len(self._buffer) == _MAX_BUFFERED:
            self._buffer.popleft()
            self.dropped += 1
            self._nearly_full = True
        self._buffer.append((seq, data))

    def _maintain(self, own: sqlite3.Connection) -> None:
        """Delete, limit and sync in a thread of its own: whatever takes time is done here."""
        with contextlib.closing(own):
            ended = False
            while not ended:
                pause = _RETRY if self._failing else _MAINTENANCE
                ended = self._ending.wait(pause)
                if not self._is_there():
                    _log.error(
                        "the outbox %s is gone: outcomes are delivered as long as the line runs, "
                        "and a kill loses what no sink has had; restart the line, which begins "
                        "a new one",
                        self.path,
                    )
                    return
                try:
                    if self._changed:
                        self._changed = False
                        self._clean_up(own)
                except sqlite3.Error as error:
                    _log.debug("the outbox %s: %s", self.path, error)
                    self._changed = True  # as long as the disk is full
                self._log_dropped()

    def _is_there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self.path.stat(), self._file)
        return False

    def _clean_up(self, own: sqlite3.Connection) -> None:
        if self._failing:
            self._flush_buffer()
        with self._lock:
            done = self._oldest_cursor()
        self._delete("seq <= ?", done)
        self._enforce_limits(own)
        own.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if self.path.with_name(f"{_FILE}-wal").stat().st_size > _MAX_WAL:
            with self._lock:  # `put` waits for it
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _flush_buffer(self) -> None:
        """Write to disk what has waited in memory for space."""
        while True:
            with self._lock:
                least = self._oldest_cursor()
                for seq, data in list(islice(self._buffer, _CHUNK)):
                    if seq > least and not self._insert(seq, data):
                        return
                    self._buffer.popleft()
                if not self._buffer:
                    if self._save():
                        self._failing = False
                        _log.warning("the outbox %s can be written again", self.path)
                    return

    def _enforce_limits(self, own: sqlite3.Connection) -> None:
        """Drop the oldest outcomes while a limit is exceeded."""
        while (share := self._share(own)) > 1:
            excess = self._before + self._added - self._limits.outcomes
            self.dropped += self._delete("1", most=max(excess, _CHUNK))
        self._nearly_full = max(share, len(self._buffer) / _MAX_BUFFERED) > _LOW_WATER

    def _share(self, own: sqlite3.Connection) -> float:
        """The share of its limits that the outbox takes; 1 is all."""
        [(pages,)], [(free,)], [(size,)] = (
            own.execute(f"PRAGMA {name}").fetchall()
            for name in ("page_count", "freelist_count", "page_size")
        )
        rows = self._before + self._added
        used = (pages - free) * size / (self._limits.megabytes << 20) if rows else 0
        return max(rows / self._limits.outcomes, used)

    def _log_dropped(self) -> None:
        """Log when outcomes begin to be dropped, and when that is over."""
        if self.dropped > self._reported:
            if self._dropped_before is None:
                self._dropped_before = self._reported
                _log.error("the outbox %s is full: the oldest outcomes are dropped", self.path)
                text = (
                    "a receiver was away for too long: the oldest outcomes that waited for it "
                    "are dropped"
                )
                self.put(Notice(kind="spool", text=text, time=current_time(), id=new_id()))
            self._reported = self.dropped
        elif self._dropped_before is not None and not self._nearly_full:
            _log.warning(
                "the outbox %s has room again; %d outcome(s) were dropped",
                self.path,
                self._reported - self._dropped_before,
            )
            self._dropped_before = None

    def _delete(self, where: str, *values: int, most: int = sys.maxsize) -> int:
        """Delete the oldest rows, in portions short enough for `put` to wait for;
        returns how many.
        """
        deleted = 0
        while deleted < most:
            with self._lock:
                cursor = self._db.execute(
                    "DELETE FROM outcomes WHERE seq IN (SELECT seq FROM outcomes "  # noqa: S608
                    f"WHERE {where} ORDER BY seq LIMIT ?)",
                    (*values, min(_CHUNK, most - deleted)),
                )
                self._added -= cursor.rowcount
            deleted += cursor.rowcount
            if cursor.rowcount < _CHUNK:
                break
            time.sleep(0.001)  # lets `put` in
        return deleted


def _place(origin: Path) -> str:
    """What a copy of the outbox, or another start of this machine, has not in common with it."""
    if not origin.exists():
        origin.touch(0o600)
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {origin.stat().st_ctime_ns}"


def _crc(seq: int, data: bytes) -> int:
    """A checksum of a row."""
    return zlib.crc32(b"%d" % seq, zlib.crc32(data))


@contextlib.contextmanager
def open_outbox(folder: Path, limits: Limits) -> Iterator[Outbox]:
    """Open the outbox in a folder.

    UsageError when another daemon uses it, EdgeNodeError when the disk does not allow it.
    """
    with (
        lock_folder(
            folder,
            "give each daemon of this machine a --line name of its own, or stop that process",
        ),
        contextlib.closing(Outbox(folder, limits)) as outbox,
    ):
        yield outbox
