"""The outbox's file: opening an SQLite database in WAL mode, and what happens when that fails."""

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


def connect(path: Path) -> sqlite3.Connection:
    """Open or create it; sqlite3.Error when that is not possible. Each statement is a transaction."""
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # it waits for the disk: the maintenance thread does it
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def set_aside(path: Path, error: sqlite3.DatabaseError) -> None:
    """Rename an unreadable outbox: it must not keep the line from starting."""
    kept = path.with_name(f"damaged-{int(time.time())}.sqlite")
    _log.error("the outbox %s is damaged (%s): a new one begins, the old one is kept as %s", path, error, kept)
    for tail in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + tail).rename(kept.with_name(kept.name + tail))


def open_error(path: Path, error: sqlite3.OperationalError) -> OSError:
    """Why it cannot be opened: on a full disk SQLite reports an I/O error."""
    if shutil.disk_usage(path.parent).free < _LEAST_FREE:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(str(error))
