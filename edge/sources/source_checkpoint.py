"""Record of a source's inspected images, so that a restart neither repeats nor skips any."""

import contextlib
import hashlib
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage.database import is_damage
from edge.outbox.outbox_file import connect, set_aside

_TABLES = """
CREATE TABLE IF NOT EXISTS judged (key BLOB PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS in_hand (image BLOB PRIMARY KEY, times INTEGER);
"""
_log = logging.getLogger(__name__)


class SourceCheckpoint:
    """Keys with a value each, in a small database in the line's state folder; thread-safe.

    It survives a kill at any moment; a power cut may cost the last seconds, whose images are then
    inspected twice. If the disk cannot be written, that is logged once.
    """

    def __init__(self, state: Path, source: str) -> None:
        """Open the checkpoint of the source with this name;
        EdgeNodeError when it cannot be opened.
        """
        folder = state / "sources"
        file = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.sqlite"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._database = connect(file, _TABLES)
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                set_aside(file, error)  # what is still in the source is inspected again
                self._database = connect(file, _TABLES)
        except (OSError, sqlite3.Error) as error:
            raise EdgeNodeError(
                f"cannot remember in {file} what {source} has brought: {error}",
                "make the state folder writable",
            ) from error
        self._source = source
        self._logged = False

    def all(self) -> dict[bytes, bytes]:
        """All keys and their values."""
        return dict(self._database.execute("SELECT key, value FROM judged"))

    def __contains__(self, key: bytes) -> bool:
        return bool(self._database.execute("SELECT 1 FROM judged WHERE key = ?", (key,)).fetchone())

    def begin(self, key: bytes, value: bytes = b"") -> int:
        """Store that an image is in hand, before anything is done with it.

        Returns how often it has been and was never finished: at so many crashes.
        """
        with self._logging():
            image = key + b"\0" + value
            sql = (
                "INSERT INTO in_hand VALUES (?, 1) ON CONFLICT DO UPDATE "
                "SET times = times + 1 RETURNING times - 1"
            )
            crashes: int = self._database.execute(sql, (image,)).fetchone()[0]
            return crashes
        return 0

    def put(self, key: bytes, value: bytes = b"") -> None:
        """Store a value; the image is no longer in hand."""
        with self._logging():
            self._database.execute("INSERT OR REPLACE INTO judged VALUES (?, ?)", (key, value))
            self._database.execute("DELETE FROM in_hand WHERE image = ?", (key + b"\0" + value,))

    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete some keys."""
        with self._logging():
            self._database.execute("BEGIN")
            self._database.executemany("DELETE FROM judged WHERE key = ?", ((key,) for key in keys))
            self._database.execute("COMMIT")

    def prune(self, most: int) -> None:
        """Delete all but the `most` keys that were stored last."""
        with self._logging():
            self._database.execute(
                "DELETE FROM judged WHERE rowid <= (SELECT max(rowid) FROM judged) - ?", (most,)
            )

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not self._logged:
                _log.error(
                    "cannot remember what %s has brought: %s; a restart may inspect it again",
                    self._source,
                    error,
                )
            self._logged = True
