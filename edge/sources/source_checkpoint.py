"""What a source has already had judged, so that a restart neither judges it again nor forgets it."""

import contextlib
import hashlib
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from broker_config.protocol.errors import EdgeNodeError

_log = logging.getLogger(__name__)


class Memory:
    """Keys with a value each, in a small database of the line's state folder; for any thread.

    It survives the process being killed at any moment; a power cut may cost the last seconds: then an image is judged
    twice. A disk that takes nothing more is told once.
    """

    def __init__(self, state: Path, source: str) -> None:
        """Open the memory of the source with this name; EdgeNodeError when it cannot be."""
        folder = state / "sources"
        file = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.sqlite"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS judged (key BLOB PRIMARY KEY, value BLOB)")
        except (OSError, sqlite3.Error) as error:
            raise EdgeNodeError(
                f"cannot remember in {file} what {source} has brought: {error}",
                "make the state folder writable, or remove the file if it is damaged",
            ) from error
        self._source = source
        self._told = False

    def all(self) -> dict[bytes, bytes]:
        """Everything that was kept."""
        return dict(self._database.execute("SELECT key, value FROM judged"))

    def __contains__(self, key: bytes) -> bool:
        return bool(self._database.execute("SELECT 1 FROM judged WHERE key = ?", (key,)).fetchone())

    def keep(self, key: bytes, value: bytes = b"") -> None:
        """Remember a value."""
        with self._telling():
            self._database.execute("INSERT OR REPLACE INTO judged VALUES (?, ?)", (key, value))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let go of some."""
        with self._telling():
            self._database.execute("BEGIN")
            self._database.executemany("DELETE FROM judged WHERE key = ?", ((key,) for key in keys))
            self._database.execute("COMMIT")

    def forget_but(self, most: int) -> None:
        """Let go of all but the `most` that were kept last."""
        with self._telling():
            self._database.execute("DELETE FROM judged WHERE rowid <= (SELECT max(rowid) FROM judged) - ?", (most,))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not self._told:
                _log.error("cannot remember what %s has brought: %s; a restart may judge it again", self._source, error)
            self._told = True
