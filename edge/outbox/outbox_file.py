"""SQLite databases of the line, in WAL mode: opening one, and what happens when it is damaged."""

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import time
from pathlib import Path

_LEAST_FREE = 1 << 16  # bytes that SQLite needs beside a database to open it

_log = logging.getLogger(__name__)


def connect(path: Path, tables: str = "") -> sqlite3.Connection:
    """Open it; each statement is a transaction.

    With `tables`, SQL that makes them, create it or check it as a whole.

    sqlite3.Error when it cannot be opened, or is damaged.
    """
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if tables:
            [(found,)] = connection.execute("PRAGMA integrity_check(1)").fetchall()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            connection.executescript(tables)
    except UnicodeDecodeError as error:  # in the text of SQLite's own error
        connection.close()
        raise sqlite3.DatabaseError("the names in it cannot be read") from error
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def set_aside(path: Path, error: sqlite3.DatabaseError) -> Path:
    """Rename a damaged database, which must not keep the line from starting;
    return its new path.
    """
    kept = path.with_name(f"damaged-{int(time.time())}-{path.stem}.sqlite")
    _log.error("%s is damaged (%s): a new one begins, the old one is kept as %s", path, error, kept)
    for tail in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + tail).rename(kept.with_name(kept.name + tail))
    return kept


def open_error(path: Path, error: sqlite3.DatabaseError) -> OSError:
    """Why it cannot be opened: on a full disk SQLite reports an I/O error."""
    if shutil.disk_usage(path.parent).free < _LEAST_FREE:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(str(error))
