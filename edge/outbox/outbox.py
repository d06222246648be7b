"""Outcomes on their way to the sinks, on disk: they outlive the process, and wait for receivers that are away.

SQLite in WAL mode: an outcome is handed to the system when it is put, so that no kill loses it, and is safe from a
power cut a second later.
"""

import contextlib
import logging
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.storage.disk import claimed, writing
from edge.inference.verdict import Notice, Outcome, current_time, encode_outcome, new_id
from edge.outbox.delivery import Settings
from edge.outbox.outbox_file import connect, reason, set_aside

_FILE = "outcomes.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS outcomes (seq INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS cursors (name TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (one INTEGER PRIMARY KEY, id TEXT NOT NULL, boot TEXT NOT NULL);
"""
_NEWEST = ""  # no sink: a cursor that remembers a leap
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TEND = 1.0  # seconds: how much a power cut can take
_RETRY = 0.2  # seconds between attempts to write what waits in memory
_PATIENCE = 10  # milliseconds that `put` waits for another process that has locked the file
_LEAP = 20_000  # more than the numbers that a power cut can take; as milliseconds, a short time
_CHUNK = 200  # rows that are deleted at once: `put` waits for it
_LONGEST_LOG = 16 << 20  # bytes of the write-ahead log, about
_HELD = 10_000  # outcomes in memory while the disk is full
_ROOM = 0.9  # of the limits: below that there is room again

_log = logging.getLogger(__name__)


class _Named(Struct):
    """An outcome, as far as it matters whether it is the one that is meant."""

    id: str = ""


class Spool:
    """The outbox of a line with sinks. Each sink has a cursor: the number of the last outcome that it is done with.

    Outcomes are numbered: each one more than the one before, and never again the same, also when the machine lost power
    or the spool was deleted (then the numbers leap to the milliseconds since 1970, or further).
    """

    def __init__(self, folder: Path, limits: Settings) -> None:
        """Open it, or begin one; EdgeNodeError when the disk does not allow that. See `opened`, and then `begin`."""
        self.path = folder / _FILE
        self.dropped = 0  # outcomes that some sink never got, since the start
        self.newest = 0  # the number of the last outcome
        self.id = ""  # of this spool: another one has another
        self._cursors: dict[str, int] = {}
        self._limits = limits
        self._lock = threading.Lock()  # of all that follows; held for well under a millisecond
        self._arrived = threading.Condition(self._lock)
        self._held: deque[tuple[int, bytes]] = deque()  # newer than all on disk; while that is full
        self._full = False
        self._crowded = False  # whether more may have to be dropped soon
        self._known = 0  # of the outcomes that were dropped, those that were told
        self._crisis: int | None = None  # how many had been dropped when the present crisis began
        self._changed = True
        with writing(folder):
            try:
                self._open()
            except sqlite3.OperationalError as error:
                raise reason(self.path, error) from error
            except sqlite3.DatabaseError as error:
                set_aside(self.path, error)
                self._open()
        self._before = sys.maxsize  # rows that were there at the start; counting them takes its time
        self._added = 0  # rows, since the start
        self._reader = connect(self.path)
        self._reading = threading.Lock()
        self._ending = threading.Event()
        self._tender = threading.Thread(target=self._tend, name="spool", daemon=True)

    def begin(self, names: Sequence[str]) -> None:
        """Serve these sinks from now on: a new name begins at the present, one that is gone is forgotten."""
        with self._lock:
            self._tell_forgotten(set(self._cursors) - set(names))
            self._cursors = {name: self._cursors.get(name, self.newest) for name in names}
            self._save()
        if not self._tender.ident:
            self._tender.start()

    def put(self, outcome: Outcome) -> None:
        """Take an outcome over; never raises."""
        data = encode_outcome(outcome)
        with self._arrived:
            self.newest += 1
            if self._held or not self._insert(self.newest, data):
                self._hold(self.newest, data)
            self._changed = True
            self._arrived.notify_all()

    def wait(self, name: str, seconds: float, closing: threading.Event) -> bool:
        """Wait until there is something for a sink, at most `seconds`, and not when `closing`; whether there is."""
        with self._arrived:
            self._arrived.wait_for(lambda: self.newest > self._cursors[name] or closing.is_set(), seconds)
            return self.newest > self._cursors[name]

    def wake(self) -> None:
        """Let those who wait look at their `closing`."""
        with self._arrived:
            self._arrived.notify_all()

    def read(self, name: str, most: int) -> list[tuple[int, bytes]]:
        """The next outcomes for a sink, at most `most`: number and JSON."""
        with self._lock:
            after = self._cursors[name]
            held = list(islice((row for row in self._held if row[0] > after), most))  # before the disk: none is missed
        with self._reading:
            rows: list[tuple[int, bytes]] = self._reader.execute(
                "SELECT seq, data FROM outcomes WHERE seq > ? ORDER BY seq LIMIT ?", (after, most)
            ).fetchall()
        last = rows[-1][0] if rows else after
        return (rows + [row for row in held if row[0] > last])[:most]

    def move(self, name: str, seq: int) -> None:
        """A sink is done with all outcomes up to `seq`."""
        with self._lock:
            if name not in self._cursors:
                return  # it is gone, and was slow
            self._cursors[name] = seq
            self._changed = True
            if not self._full:
                self._execute("UPDATE cursors SET seq = ? WHERE name = ?", (seq, name))

    def waiting(self, name: str) -> int:
        """How many outcomes a sink has not had yet."""
        with self._lock:
            return min(self.newest - self._cursors[name], self._before + self._added + len(self._held))

    def holds(self, seq: int, id_: str) -> bool:
        """Whether the outcome with this number and id is of this spool, and some sink may still want it."""
        with self._lock:
            data = next((data for number, data in self._held if number == seq), None)
        if data is None:
            with self._reading:
                row = self._reader.execute("SELECT data FROM outcomes WHERE seq = ?", (seq,)).fetchone()
            data = row[0] if row else b"{}"
        return bool(id_) and msgspec.json.decode(data, type=_Named).id == id_

    def close(self) -> None:
        """Bring everything to disk."""
        self._ending.set()
        if self._tender.is_alive():
            self._tender.join()
        if self._full:
            self._db.execute("PRAGMA busy_timeout = 1000")
            self._write_held()
        with self._lock:
            if self._held:
                _log.error("the spool %s: %d outcome(s) that waited in memory are lost", self.path, len(self._held))
            if self._tender.ident:
                self._execute("UPDATE facts SET boot = ''")
            self._db.close()
        with self._reading:
            self._reader.close()

    def _open(self) -> None:
        self._db = connect(self.path)
        try:
            self._load()
        except sqlite3.Error:
            self._db.close()
            raise

    def _load(self) -> None:
        self._db.executescript(_TABLES)
        self._boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
        self._cursors = dict(self._db.execute("SELECT name, seq FROM cursors"))
        [(last,)] = self._db.execute("SELECT MAX(seq) FROM outcomes")
        self.newest = max(last or 0, *self._cursors.values(), 0)
        self._cursors.pop(_NEWEST, None)
        found = self._db.execute("SELECT id, boot FROM facts").fetchone()
        self.id, before = found or (new_id()[:8], "never")
        if before not in ("", self._boot):  # a new spool, or a power cut: some numbers may be known to receivers only
            self.newest = max(self.newest + _LEAP, int(1000 * time.time()))  # many a machine starts in 1970
        self._first = self.newest
        self._db.execute(f"PRAGMA busy_timeout = {_PATIENCE}")

    def _save(self) -> bool:
        """Write all but the outcomes, in one transaction: a kill in between must not lose a cursor."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (1, ?, ?)", (self.id, self._boot))
            self._db.execute("DELETE FROM cursors")
            rows = (self._cursors | {_NEWEST: self.newest}).items()
            self._db.executemany("INSERT INTO cursors VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._tell_unwritten(error)
            return False
        return True

    def _tell_forgotten(self, names: Iterable[str]) -> None:
        for name in names:
            [(left,)] = self._db.execute("SELECT COUNT(*) FROM outcomes WHERE seq > ?", (self._cursors[name],))
            if left:
                _log.warning("%d outcome(s) that waited for %s are dropped: it is in the settings no more", left, name)

    def _least(self) -> int:
        """The number up to which all sinks are done."""
        return min(self._cursors.values(), default=self.newest)

    def _execute(self, sql: str, values: Sequence[object] = ()) -> bool:
        """Write, in one transaction; False, and said once, when the disk refuses."""
        try:
            self._db.execute(sql, values)
        except sqlite3.Error as error:
            self._tell_unwritten(error)
            return False
        return True

    def _tell_unwritten(self, error: sqlite3.Error) -> None:
        if not self._full:
            _log.error("the spool %s cannot be written: %s; outcomes wait in memory", self.path, error)
        self._full = self._changed = True

    def _insert(self, seq: int, data: bytes) -> bool:
        if not self._execute("INSERT INTO outcomes VALUES (?, ?)", (seq, data)):
            return False
        self._added += 1
        return True

    def _hold(self, seq: int, data: bytes) -> None:
        if len(self._held) == _HELD:
            self._held.popleft()
            self.dropped += 1
            self._crowded = True
        self._held.append((seq, data))

    def _tend(self) -> None:
        """Keep the spool small and safe, in a thread of its own: what takes time is done here."""
        with contextlib.closing(connect(self.path)) as own:
            ended = False
            while not ended:
                ended = self._ending.wait(_RETRY if self._full else _TEND)
                try:
                    if self._changed:
                        self._changed = False
                        self._tidy(own)
                except sqlite3.Error as error:
                    _log.debug("the spool %s: %s", self.path, error)
                    self._changed = True  # as long as the disk is full
                self._tell_dropped()

    def _tidy(self, own: sqlite3.Connection) -> None:
        if self._before == sys.maxsize:
            [(self._before,)] = own.execute("SELECT COUNT(*) FROM outcomes WHERE seq <= ?", (self._first,))
        if self._full:
            self._write_held()
        with self._lock:
            done = self._least()
        self._delete("seq <= ?", done)
        self._limit(own)
        own.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if self.path.with_name(f"{_FILE}-wal").stat().st_size > _LONGEST_LOG:
            with self._lock:  # `put` waits for it
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _write_held(self) -> None:
        """Bring to disk what waited in memory for space."""
        while True:
            with self._lock:
                least = self._least()
                for seq, data in list(islice(self._held, _CHUNK)):
                    if seq > least and not self._insert(seq, data):
                        return
                    self._held.popleft()
                if not self._held:
                    if self._save():
                        self._full = False
                        _log.warning("the spool %s can be written again", self.path)
                    return

    def _limit(self, own: sqlite3.Connection) -> None:
        """Drop the oldest when there is too much."""
        while (share := self._share(own)) > 1:
            excess = self._before + self._added - self._limits.outcomes
            self.dropped += self._delete("1", most=max(excess, _CHUNK))
        self._crowded = share > _ROOM

    def _share(self, own: sqlite3.Connection) -> float:
        """How much of its limits the spool takes; 1 is all."""
        [(pages,)], [(free,)], [(size,)] = (
            own.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "freelist_count", "page_size")
        )
        rows = self._before + self._added
        return max(rows / self._limits.outcomes, (pages - free) * size / (self._limits.megabytes << 20) if rows else 0)

    def _tell_dropped(self) -> None:
        """Say it when outcomes begin to be dropped, and when that is over."""
        if self.dropped > self._known:
            if self._crisis is None:
                self._crisis = self._known
                _log.error("the spool %s is full: the oldest outcomes are dropped", self.path)
                text = "a receiver was away for too long: the oldest outcomes that waited for it are dropped"
                self.put(Notice(kind="spool", text=text, time=current_time(), id=new_id()))
            self._known = self.dropped
        elif self._crisis is not None and not self._crowded:
            _log.warning(
                "the spool %s has room again; %d outcome(s) were dropped", self.path, self._known - self._crisis
            )
            self._crisis = None

    def _delete(self, where: str, *values: int, most: int = sys.maxsize) -> int:
        """Delete the oldest rows, in portions that `put` can wait for; returns how many."""
        deleted = 0
        while deleted < most:
            with self._lock:
                cursor = self._db.execute(
                    f"DELETE FROM outcomes WHERE seq IN (SELECT seq FROM outcomes WHERE {where} ORDER BY seq LIMIT ?)",  # noqa: S608
                    (*values, min(_CHUNK, most - deleted)),
                )
                self._added -= cursor.rowcount
            deleted += cursor.rowcount
            if cursor.rowcount < _CHUNK:
                break
            time.sleep(0.001)  # lets `put` in
        return deleted


@contextlib.contextmanager
def opened(folder: Path, limits: Settings) -> Iterator[Spool]:
    """The spool in a folder.

    UsageError when another daemon uses it, EdgeNodeError when the disk does not allow it.
    """
    with (
        claimed(folder, "give each daemon of this machine a --line name of its own, or stop that process"),
        contextlib.closing(Spool(folder, limits)) as spool,
    ):
        yield spool
