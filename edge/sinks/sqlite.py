"""Outcomes in an SQLite database, for queries."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from broker_config.protocol.errors import UsageError
from edge.config.instance import Instance
from edge.sinks.sink import Item, Origin, SinkDown, to_json

_TABLE = """
CREATE TABLE IF NOT EXISTS outcomes (
    id TEXT PRIMARY KEY, seq INTEGER NOT NULL, type TEXT NOT NULL, time TEXT NOT NULL, \
image TEXT, label TEXT,
    confidence REAL, defect INTEGER, json TEXT NOT NULL
)
"""
_INSERT = "INSERT OR IGNORE INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sqlite"
):
    """`[[sinks]] kind = "sqlite"`: a row for each outcome in the table `outcomes`."""

    path: str

    def open_sink(self, instance: Instance, origin: Origin) -> "Sqlite":
        """Open the sink."""
        return Sqlite(Path(self.path))


class Sqlite:
    """A row for each outcome, once: its id is the key."""

    def __init__(self, path: Path) -> None:
        """Open or create the database; UsageError when it cannot be used."""
        import sqlite3  # noqa: PLC0415  (only lines with this sink load it)

        self.name = f"sqlite:{path.absolute()}"
        self._path = path
        self._connect = sqlite3.connect
        self._fault = sqlite3.Error
        self._file: os.stat_result | None = None
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            raise UsageError(
                f"cannot write verdicts to {path}: {error}",
                "name a file in a folder that exists, on a disk with room",
            ) from error

    def deliver(self, items: Sequence[Item]) -> None:
        """Insert them in one transaction. When the database was moved away, a new one is begun."""
        try:
            if not self._is_in_place():
                self._file = None
                self._close_moved()
                self._open()
            with self._db:
                self._db.executemany(_INSERT, map(_row, items))
        except (self._fault, OSError) as error:
            raise SinkDown(f"cannot write {self._path}: {error}") from error

    def close(self) -> None:
        """Close the database."""
        with contextlib.suppress(self._fault):
            self._db.close()

    def _close_moved(self) -> None:
        """Close a database that was moved away; SQLite itself would leave its write-ahead log
        behind.
        """
        with contextlib.suppress(self._fault):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    def _open(self) -> None:
        self._db = self._connect(self._path, check_same_thread=False)
        # readers and the writer do not wait for each other
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(_TABLE)
        self._file = self._path.stat()

    def _is_in_place(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._file is not None and os.path.samestat(self._path.stat(), self._file)
        return False


def _row(item: Item) -> tuple[object, ...]:
    outcome = item.outcome
    cells = (getattr(outcome, name, None) for name in ("image", "label", "confidence", "defect"))
    return (
        outcome.id,
        item.seq,
        type(outcome).__name__,
        outcome.time,
        *cells,
        to_json(item).decode(),
    )
