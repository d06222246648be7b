"""Journal of a head: runs, admitted sensors and closed rounds in SQLite,
a transaction for each group of rounds.
"""

import contextlib
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Validation
from broker_config.storage.database import Database, reading
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.privacy import predates_binding
from edge_node.extensions.vfl.server.head_state import Member
from edge_node.extensions.vfl.server.spec import describe_changes

_TABLES = """
CREATE TABLE runs (run TEXT PRIMARY KEY, spec BLOB NOT NULL, attempt INTEGER NOT NULL,
    ended INTEGER NOT NULL DEFAULT 0);
CREATE TABLE sensors (
    run TEXT NOT NULL, sensor TEXT NOT NULL, identity TEXT NOT NULL, columns INTEGER NOT NULL,
    PRIMARY KEY (run, sensor));
CREATE TABLE rounds (run TEXT NOT NULL, round INTEGER NOT NULL, fact BLOB NOT NULL, \
PRIMARY KEY (run, round));
"""
_MOST = 100_000  # rounds whose facts are kept
_NEWEST = "SELECT run, spec, attempt FROM runs ORDER BY rowid DESC LIMIT 1"


class RunRecord(NamedTuple):
    """A run, and where it stands."""

    spec: VflSpec
    begun: float  # its newest attempt, seconds since 1970; 0 if there was none
    ended: bool


class ClosedRound(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a round. Seconds by sensor; a sensor that was absent has none."""

    round: int
    attempt: int
    first: int  # position of the first product
    last: int  # past the end
    iterations: tuple[int, ...]  # E_{t,k}, in the order of sensors; 0: was absent
    # F_t before the local iterations, of the denoised embeddings; None: was not finite
    loss: float | None
    rmse: float | None = None  # of the result, likewise; where classes are numbers
    # of the newest products; None: nothing was learnt before these
    validation: Validation | None = None
    seconds: float  # since the round before it was closed
    collection: dict[str, float]
    communication: dict[str, float]
    iteration: dict[str, float]


class Journal(Database):
    """The facts of a head's runs. EdgeNodeError if the disk fails."""

    FILE = "vfl.sqlite"
    VERSION = 3
    TABLES = _TABLES

    def newest(self) -> VflSpec | None:
        """The spec of the newest run; None if there is none."""
        with self._errors():
            row = self._db.execute(_NEWEST).fetchone()
        return msgspec.json.decode(row[1], type=VflSpec) if row else None

    def begin(self, spec: VflSpec) -> None:
        """Record a new run."""
        self._write(
            (
                "INSERT INTO runs (run, spec, attempt) VALUES (?, ?, 0)",
                (spec.run, msgspec.json.encode(spec)),
            )
        )

    def has_rounds(self, run: str) -> bool:
        """Whether any round of a run is recorded."""
        with self._errors():
            return (
                self._db.execute("SELECT 1 FROM rounds WHERE run = ? LIMIT 1", (run,)).fetchone()
                is not None
            )

    def attempt(self, run: str) -> int:
        """The number of the next attempt: higher than any before it, whatever is killed,
        or restored from a copy.

        Sensors that go on know the numbers of a newer journal, so it is the hundredths of seconds
        since 1970, or more.
        """
        with self._errors():
            (last,) = self._db.execute("SELECT attempt FROM runs WHERE run = ?", (run,)).fetchone()
        attempt = max(int(last) + 1, int(100 * time.time()))
        self._write(("UPDATE runs SET attempt = ? WHERE run = ?", (attempt, run)))
        return attempt

    def end(self, run: str, round_: int) -> None:
        """Record that a run has ended for all, with this round."""
        self._write(("UPDATE runs SET ended = ? WHERE run = ?", (round_, run)))

    def ended(self, run: str) -> int:
        """The round with which a run has ended; 0 if it has not."""
        with self._errors():
            (round_,) = self._db.execute("SELECT ended FROM runs WHERE run = ?", (run,)).fetchone()
        return int(round_)

    def admit(self, run: str, sensor: str, member: Member) -> None:
        """Record a sensor that is admitted, or has a new state folder."""
        self._write(
            (
                "INSERT OR REPLACE INTO sensors VALUES (?, ?, ?, ?)",
                (run, sensor, member.identity, member.columns),
            )
        )

    def members(self, run: str) -> dict[str, Member]:
        """The sensors that were admitted."""
        with self._errors():
            rows = self._db.execute(
                "SELECT sensor, identity, columns FROM sensors WHERE run = ?", (run,)
            )
            return {sensor: Member(identity, columns) for sensor, identity, columns in rows}

    def close_rounds(self, run: str, rounds: Sequence[ClosedRound]) -> None:
        """Record a group of closed rounds.

        Repeated rounds replace their earlier record; very old ones are dropped.
        """
        if rounds:
            self._write(
                *(
                    (
                        "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)",
                        (run, each.round, msgspec.json.encode(each)),
                    )
                    for each in rounds
                ),
                (
                    "DELETE FROM rounds WHERE run = ? AND round <= ?",
                    (run, rounds[-1].round - _MOST),
                ),
            )


def history(folder: Path) -> list[ClosedRound]:
    """The closed rounds of the newest run in a head's state folder, in order.

    Raises:
        UsageError: there is no journal in `folder`.
        EdgeNodeError: it cannot be read.
    """
    with _reading(folder) as database:
        run = database.execute(_NEWEST).fetchone()
        run_name = run[0] if run else ""
        rows = database.execute("SELECT fact FROM rounds WHERE run = ? ORDER BY round", (run_name,))
        return [msgspec.json.decode(fact, type=ClosedRound) for (fact,) in rows]


def newest_spec(folder: Path) -> VflSpec | None:
    """That of the newest run in a head's state folder; None if it has no rounds yet,
    so that it may still change.

    Raises:
        EdgeNodeError: it cannot be read.
    """
    path = folder / Journal.FILE
    if not path.exists() or not path.stat().st_size:
        return None
    with _reading(folder) as database:
        row = database.execute(_NEWEST).fetchone()
        if (
            row is None
            or database.execute("SELECT 1 FROM rounds WHERE run = ? LIMIT 1", row[:1]).fetchone()
            is None
        ):
            return None
    return msgspec.json.decode(row[1], type=VflSpec)


def runs(folder: Path) -> list[RunRecord]:
    """All runs in a head's state folder, the newest last; the journal is not verified.

    Errors as `history`.
    """
    with _reading(folder, verify=False) as database:
        rows = database.execute("SELECT spec, attempt, ended FROM runs ORDER BY rowid")
        return [
            RunRecord(msgspec.json.decode(spec, type=VflSpec), at / 100, bool(ended))
            for spec, at, ended in rows
        ]


def rounds_since(folder: Path, run: str, first: int) -> list[ClosedRound]:
    """The closed rounds of a run from `first` on, in order; the journal is not verified.

    Errors as `history`.
    """
    with _reading(folder, verify=False) as database:
        rows = database.execute(
            "SELECT fact FROM rounds WHERE run = ? AND round >= ? ORDER BY round", (run, first)
        ).fetchall()
    return [msgspec.json.decode(fact, type=ClosedRound) for (fact,) in rows]


def _reading(
    folder: Path, *, verify: bool = True
) -> contextlib.AbstractContextManager[sqlite3.Connection]:
    return reading(folder / Journal.FILE, "edge-node vfl coordinate", verify=verify)


def resume_or_begin(journal: Journal, spec: VflSpec, *, new: bool) -> VflSpec:
    """The spec of the run that goes on, or that begins:
    settings are fixed once rounds are written down.

    Raises:
        UsageError: the run in the journal has other settings, or noise of an earlier version.
    """
    old = journal.newest()
    if old is None or new:
        journal.begin(spec)
        return spec
    same = msgspec.structs.replace(spec, run=old.run, software=old.software, revision=old.revision)
    if (same != old or predates_binding(old)) and not journal.has_rounds(old.run):
        journal.begin(spec)
        return spec
    if same != old:
        raise UsageError(
            f"the run in this state folder has other settings: {describe_changes(old, same)}",
            "give the same options as before, begin another run with --new, or choose another "
            "--state folder",
        )
    if predates_binding(old):
        raise UsageError(
            f"run {old.run} in this state folder began with an earlier version of edge-node, whose "
            "noise could hide two embeddings",
            "begin another run with --new",
        )
    return old
