"""What a coordinator must not forget: SQLite for facts; tensors lie beside it as content-addressed files."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from broker_config.errors import EdgeNodeError, UsageError
from broker_config.messages import Manifest, Spec

_SCHEMA = """
CREATE TABLE IF NOT EXISTS federation (run TEXT PRIMARY KEY, spec BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
    run TEXT NOT NULL, round INTEGER NOT NULL, broadcast BLOB NOT NULL, closed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run, round));
CREATE TABLE IF NOT EXISTS contributions (
    run TEXT NOT NULL, round INTEGER NOT NULL, node TEXT NOT NULL, weight REAL NOT NULL, digest TEXT, bytes INTEGER,
    PRIMARY KEY (run, round, node));
"""


class ClosedRound(msgspec.Struct, frozen=True):
    """A line of a run's history."""

    run: str
    round: int
    weights: dict[str, float]  # by node, as it measured them
    bytes: int  # received in contributions


class Journal:
    """Facts of one run. Every method returns after its effect is on disk."""

    def __init__(self, folder: Path):
        self._folder = folder
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise EdgeNodeError(
                f"the state folder {self._folder} cannot be written ({error})",
                "free some space there, or pass a writable --state folder",
            ) from error

    def _write(self, statement: str, *values: object) -> None:
        with self._writing():
            self._db.execute(statement, values)

    def begin(self, spec: Spec) -> None:
        """A new run."""
        self._write("INSERT INTO federation VALUES (?, ?)", spec.run, msgspec.json.encode(spec))

    def opened(self, manifest: Manifest) -> None:
        """`manifest.round` starts from this broadcast."""
        self._write(
            "INSERT OR IGNORE INTO rounds (run, round, broadcast) VALUES (?, ?, ?)",
            manifest.run,
            manifest.round,
            msgspec.json.encode(manifest),
        )

    def contributed(self, run: str, round_: int, node: str, weight: float, blob: Manifest | None) -> None:
        """A node's contribution is summed with this weight."""
        digest, size = (blob.digest, blob.size) if blob else (None, 0)
        self._write(
            "INSERT OR IGNORE INTO contributions VALUES (?, ?, ?, ?, ?, ?)", run, round_, node, weight, digest, size
        )

    def closed(self, run: str, round_: int) -> None:
        """The round's contributions are averaged."""
        self._write("UPDATE rounds SET closed = 1 WHERE run = ? AND round = ?", run, round_)

    def close(self) -> None:
        """Release the file."""
        self._db.close()


def newest_spec(folder: Path) -> Spec:
    """The spec of the newest run in a coordinator's state folder.

    Raises:
        UsageError: there is no journal in `folder`, or no run in it.
    """
    with contextlib.closing(_open(folder)) as database:
        row = database.execute("SELECT spec FROM federation ORDER BY rowid DESC LIMIT 1").fetchone()
    if row is None:
        raise UsageError(f"the journal in {folder} holds no run", "start edge-node coordinate with this --state folder")
    return msgspec.json.decode(row[0], type=Spec)


def history(folder: Path) -> list[ClosedRound]:
    """The closed rounds of the newest run in a coordinator's state folder, in order.

    Raises:
        UsageError: there is no journal in `folder`.
    """
    with contextlib.closing(_open(folder)) as database:
        rows = database.execute(
            "SELECT run, round, node, weight, bytes FROM contributions JOIN rounds USING (run, round)"
            " WHERE closed AND run = (SELECT run FROM federation ORDER BY rowid DESC LIMIT 1) ORDER BY round, node"
        )
        closed: dict[int, ClosedRound] = {}
        for run, round_, node, weight, size in rows:
            line = closed.get(round_, ClosedRound(run, round_, {}, 0))
            closed[round_] = ClosedRound(run, round_, {**line.weights, node: weight}, line.bytes + size)
    return list(closed.values())


def _open(folder: Path) -> sqlite3.Connection:
    path = folder / "journal.sqlite"
    if not path.is_file():
        raise UsageError(f"there is no journal in {folder}", "pass the --state folder of edge-node coordinate")
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)
