"""SQLite database in a state folder: each change is one transaction, on disk when the method returns."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from broker_config.protocol.errors import EdgeNodeError, UsageError

Statement = tuple[str, tuple[object, ...]]
"""SQL and its parameters."""


class Database:
    """Base of journals, which define FILE, VERSION and TABLES. EdgeNodeError if the disk fails."""

    FILE: ClassVar[str]
    VERSION: ClassVar[int]
    TABLES: ClassVar[str]  # SQL that makes them

    def __init__(self, folder: Path):
        """Raise UsageError if the file has tables of another version."""
        self._folder = folder
        with self._disk_errors():
            self._db = sqlite3.connect(folder / self.FILE, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not tables:
                self._db.executescript(f"BEGIN; {self.TABLES} PRAGMA user_version = {self.VERSION}; COMMIT;")
                version = self.VERSION
        if version != self.VERSION:
            self.close()
            raise UsageError(
                f"the journal in {folder} was written by another version of edge-node",
                "finish that run with its version, or choose another --state folder",
            )

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _write(self, *statements: Statement) -> None:
        """Execute all statements in one transaction."""
        with self._disk_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    self._db.execute(statement, values)
                self._db.execute("COMMIT")
            except sqlite3.Error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise EdgeNodeError(
                f"the journal in {self._folder} cannot be written: {error}",
                "free some space there, make it writable, and start again: nothing is lost",
            ) from error
