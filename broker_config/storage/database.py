"""SQLite database in a state folder: each change is one transaction,
on disk when the method returns.

It is verified when it is opened: beside its rows it holds a checksum of them all. There is no
write-ahead log, since SQLite takes a damaged one for a shorter one, and what was committed last
would be gone without a word.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from broker_config.protocol.errors import EdgeNodeError, UsageError

Statement = tuple[str, tuple[object, ...]]
"""SQL and its parameters."""

# results of SQLite that speak of the disk, or of who else uses the file; others, of what is in it
_DISK = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
)
_CHECKSUM = "CREATE TABLE checksum (value TEXT NOT NULL); INSERT INTO checksum VALUES ('');"
_MODULUS = 1 << 256


class Database:
    """Base of journals, which define FILE, VERSION and TABLES, and perhaps MORE_TABLES.

    EdgeNodeError if the disk fails, or the file is damaged.
    """

    FILE: ClassVar[str]
    VERSION: ClassVar[int]
    TABLES: ClassVar[str]  # SQL that makes them
    # likewise, where they are not there: those that files of earlier versions lack
    MORE_TABLES: ClassVar[str] = ""

    def __init__(self, folder: Path):
        """Raise UsageError if the file has tables of another version."""
        self._path = folder / self.FILE
        with self._errors():
            self._db = sqlite3.connect(self._path, isolation_level=None)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.execute("PRAGMA synchronous=EXTRA")
        # else rows that are replaced are deleted without a trigger
        self._db.execute("PRAGMA recursive_triggers=ON")
        if not _table_names(self._db):
            self._db.executescript(
                f"BEGIN; {self.TABLES} {_CHECKSUM} PRAGMA user_version = {self.VERSION};"
            )
            self._sum = _compute_sum(self._db)
            self._save_sum()
            self._db.execute("COMMIT")
        self._sum = _verify(self._db, self._path)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != self.VERSION:
            raise UsageError(
                f"the journal in {self._path.parent} was written by another version of edge-node",
                "finish that run with its version, or choose another --state folder",
            )
        if "checksum" not in _table_names(self._db):
            raise _damaged(self._path, "its checksum is missing")
        self._add_tables()
        self._keep_sum()

    def _add_tables(self) -> None:
        before = _table_names(self._db)
        self._db.executescript(f"BEGIN; {self.MORE_TABLES}")
        if _table_names(self._db) != before:
            self._sum = _compute_sum(self._db)
            self._save_sum()
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _write(self, *statements: Statement) -> None:
        """Execute all statements in one transaction."""
        before = self._sum
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    self._db.execute(statement, values)
                self._save_sum()
                self._db.execute("COMMIT")
            except sqlite3.Error:
                self._sum = before
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _keep_sum(self) -> None:
        """Have every change of a row change the sum, too."""

        def add(sign: int, table: str, *row: object) -> None:
            self._sum = (self._sum + sign * _hash(table, row)) % _MODULUS

        self._db.create_function("add_to_sum", -1, add)
        for table in _summed_tables(self._db):
            columns = [name for _, name, *_ in self._db.execute(f"PRAGMA table_info({table})")]
            sign_texts = []
            for sign, row in ((1, "new"), (-1, "old")):
                sign_texts.append(
                    f"SELECT add_to_sum({sign}, '{table}', "
                    f"{', '.join(f'{row}.{name}' for name in columns)});"
                )
            new, old = sign_texts
            for event, actions in (("INSERT", new), ("DELETE", old), ("UPDATE", old + new)):
                self._db.execute(
                    f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN "
                    f"{actions} END"
                )

    def _save_sum(self) -> None:
        self._db.execute("UPDATE checksum SET value = ?", (f"{self._sum:064x}",))

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return _errors(self._path)


@contextlib.contextmanager
def reading(path: Path, command: str, *, verify: bool = True) -> Iterator[sqlite3.Connection]:
    """A journal, for reading what is in it now; it may be in use, and its writer waits meanwhile.

    To `verify` it takes a while if it is long: whoever reads it again and again does without.

    Raises:
        UsageError: there is none; `command` would have made it.
        EdgeNodeError: it cannot be read, or is damaged.
    """
    if not path.is_file():
        raise UsageError(
            f"there is no journal in {path.parent}", f"pass the --state folder of {command}"
        )
    # Not read-only: what a killed process left half written is to be taken back.
    with (
        _errors(path),
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as database,
    ):
        database.execute("BEGIN")
        if verify and _table_names(database):
            _verify(database, path)
        yield database


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise
    except sqlite3.Error as error:
        if is_damage(error):
            raise _damaged(path, str(error)) from error
        raise _unusable(path, error) from error
    except UnicodeDecodeError as error:  # in the text of SQLite's own error
        raise _damaged(path, "the names in it cannot be read") from error
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> EdgeNodeError:
    goes_on = (
        "free some space there, make it writable, and start again: it goes on from what was "
        "written before"
    )
    removed = "the folder was removed: restore it from a copy, or begin another run with --new"
    remedy = goes_on if path.parent.exists() else removed
    return EdgeNodeError(f"the journal in {path.parent} cannot be written: {error}", remedy)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error speaks of what is in the file, not of the disk or of who else uses it."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DISK


def check_not_lost(path: Path, folder: Path, left: Iterable[object]) -> None:
    """Raise UsageError if a journal that holds no run has `left` something of one in `folder`."""
    if any(True for _ in left):
        raise UsageError(
            f"the journal {path} holds no run, but {folder} holds tensors of one",
            f"restore the folder {path.parent} from a copy, or begin another run with --new",
        )


def _damaged(path: Path, how: str) -> EdgeNodeError:
    return EdgeNodeError(
        f"the journal {path} is damaged: {how}",
        f"restore the folder {path.parent} from a copy, or remove {path} and begin another run "
        "with --new",
    )


def _table_names(database: sqlite3.Connection) -> list[str]:
    return [
        name
        for (name,) in database.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")
    ]


def _summed_tables(database: sqlite3.Connection) -> list[str]:
    return [name for name in _table_names(database) if name != "checksum"]


def _verify(database: sqlite3.Connection, path: Path) -> int:
    """The sum over all rows. EdgeNodeError if it is not the one that was written with them."""
    (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise _damaged(path, found)
    computed = _compute_sum(database)
    if "checksum" in _table_names(database):  # else it is of an earlier version
        stored = database.execute("SELECT value FROM checksum").fetchall()
        if stored != [(f"{computed:064x}",)]:
            raise _damaged(path, "its rows are not those that were written")
    return computed


def _compute_sum(database: sqlite3.Connection) -> int:
    """A sum of hashes, since it follows each row that is added, changed or deleted."""
    total = _hash("version", database.execute("PRAGMA user_version").fetchone())
    for row in database.execute("SELECT name, sql FROM main.sqlite_master"):
        total += _hash("schema", row)
    for table in _summed_tables(database):
        for row in database.execute(f"SELECT * FROM {table}"):  # noqa: S608  (a name that we gave)
            total += _hash(table, row)
    return total % _MODULUS


def _hash(table: str, row: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr((table, *row)).encode()).digest())
