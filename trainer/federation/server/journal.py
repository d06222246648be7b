"""Journal of a coordinator: the facts of its runs in SQLite,
beside tensors in content-addressed files.

Facts are kept for ever (a round of 5 nodes takes about 1 KB); of tensors, see `ledger`, only those
of the open round.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.protocol.retired_fields import REMEDY
from broker_config.storage.database import Database, Statement, reading
from trainer.federation.server.record_facts import Fact, facts_of_run

TRANSITIONS = (
    "begun",
    "resumed",
    "admitted",
    "opened",
    "masked",
    "contributed",
    "concluded",
    "finished",
    "aborted",
)
"""The kinds of fact, in the order in which they first occur in a run."""

_TABLES = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, spec BLOB NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, \
begun TEXT NOT NULL,
    ended TEXT, outcome TEXT, result TEXT, result_size INTEGER);
CREATE TABLE members (
    run TEXT NOT NULL, node TEXT NOT NULL, identity TEXT NOT NULL, \
finished INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run, node));
CREATE TABLE rounds (
    run TEXT NOT NULL, round INTEGER NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, \
drawn BLOB NOT NULL,
    opened TEXT NOT NULL, closed TEXT, PRIMARY KEY (run, round));
CREATE TABLE contributions (
    run TEXT NOT NULL, round INTEGER NOT NULL, node TEXT NOT NULL, weight REAL NOT NULL, \
digest TEXT,
    bytes INTEGER NOT NULL, PRIMARY KEY (run, round, node));
"""
_MORE_TABLES = """
CREATE TABLE IF NOT EXISTS masks (run TEXT PRIMARY KEY, round INTEGER NOT NULL, \
facts BLOB NOT NULL);
"""
_LATEST = "SELECT {} FROM runs ORDER BY rowid DESC LIMIT 1"
# the open one, if there is one
_CLOSE = "UPDATE rounds SET closed = ? WHERE run = ? AND closed IS NULL"
Outcome = Literal["finished", "aborted"]


class Blob(NamedTuple):
    """Tensors in the store."""

    digest: str
    size: int  # bytes


class Contribution(NamedTuple):
    """A node's part of the open round."""

    node: str
    weight: float
    digest: str | None


class Run(NamedTuple):
    """State of a run in the journal."""

    spec: Spec
    outcome: Outcome | None
    round: int  # 0 while gathering; after the last one, one more
    broadcast: Blob  # that the round starts from; after the last one, the result
    drawn: tuple[str, ...]
    contributions: tuple[Contribution, ...]  # to the open round
    members: dict[str, str]  # identities by name
    finished: frozenset[str]
    first: Blob  # the broadcast that the run began with


class ContributionTotal(NamedTuple):
    """A node's contributions to a run, in total."""

    node: str
    round: int  # the newest
    weight: float  # in that
    bytes: int  # in all


class RunRecord(NamedTuple):
    """A run, from its beginning to where it stands."""

    spec: Spec
    begun: str  # ISO 8601, UTC
    ended: str | None
    outcome: Outcome | None
    finished: frozenset[str]  # nodes that have their models


class RoundRecord(NamedTuple):
    """A round that is open or closed, and what was contributed to it so far."""

    round: int
    opened: str  # ISO 8601, UTC
    closed: str | None
    contributions: dict[str, tuple[float, int]]  # node -> weight, bytes


class ClosedRound(msgspec.Struct, frozen=True):
    """One round in the history of a run."""

    run: str
    round: int
    weights: dict[str, float]  # by node, as it measured them
    bytes: int  # received in contributions
    opened: str  # ISO 8601, UTC
    closed: str


class Journal(Database):
    """Facts; each is one transaction, on disk when its method returns.

    EdgeNodeError if the disk fails.
    """

    FILE = "journal.sqlite"
    VERSION = 3
    TABLES = _TABLES
    MORE_TABLES = _MORE_TABLES

    def begin(self, spec: Spec, broadcast: Blob) -> None:
        """Record a new run, which starts from this broadcast."""
        self._commit(
            "begun",
            (
                "INSERT INTO runs (run, spec, digest, size, begun) VALUES (?, ?, ?, ?, ?)",
                (spec.run, msgspec.json.encode(spec), *broadcast, _now()),
            ),
        )

    def resume(self, run: str, round_: int, dropped: Collection[str] = ()) -> None:
        """Forget what the `dropped` gave to the round: a process resumes the run without them."""
        self._commit(
            "resumed",
            *(
                (
                    "DELETE FROM contributions WHERE run = ? AND round = ? AND node = ?",
                    (run, round_, node),
                )
                for node in sorted(dropped)
            ),
        )

    def admit(self, run: str, node: str, identity: str) -> None:
        """Record a node that is admitted, or has a new state folder."""
        self._commit(
            "admitted",
            (
                "INSERT OR REPLACE INTO members (run, node, identity) VALUES (?, ?, ?)",
                (run, node, identity),
            ),
        )

    def open_round(self, run: str, round_: int, broadcast: Blob, drawn: Collection[str]) -> None:
        """Close the round before, and open `round_` with the average as its broadcast."""
        now = _now()
        self._commit(
            "opened",
            (_CLOSE, (now, run)),
            (
                (
                    "INSERT INTO rounds (run, round, digest, size, drawn, opened) "
                    "VALUES (?, ?, ?, ?, ?, ?)"
                ),
                (run, round_, *broadcast, msgspec.json.encode(sorted(drawn)), now),
            ),
        )

    def record_masks(
        self, run: str, round_: int, facts: bytes, drawn: Collection[str] = ()
    ) -> None:
        """Record how far the masks of the open round are; if it is given,
        who takes part in it from now on.
        """
        narrow: Statement = (
            "UPDATE rounds SET drawn = ? WHERE run = ? AND round = ?",
            (msgspec.json.encode(sorted(drawn)), run, round_),
        )
        narrowing = [narrow] if drawn else []
        self._commit(
            "masked",
            ("INSERT OR REPLACE INTO masks VALUES (?, ?, ?)", (run, round_, facts)),
            *narrowing,
        )

    def masks(self, run: str, round_: int) -> bytes | None:
        """How far the masks of a round are; None if nothing is recorded."""
        with self._errors():
            row = self._db.execute(
                "SELECT facts FROM masks WHERE run = ? AND round = ?", (run, round_)
            ).fetchone()
        return row[0] if row else None

    def add_contribution(
        self, run: str, round_: int, node: str, weight: float, blob: Blob | None
    ) -> None:
        """Record a contribution that is in the store, its weight,
        and how many bytes of it have come.
        """
        digest, size = blob or (None, 0)
        self._commit(
            "contributed",
            (
                "INSERT INTO contributions VALUES (?, ?, ?, ?, ?, ?)",
                (run, round_, node, weight, digest, size),
            ),
        )

    def conclude(self, run: str, result: Blob) -> None:
        """Close the last round: its average is the result of the run."""
        now = _now()
        self._commit(
            "concluded",
            (_CLOSE, (now, run)),
            (
                (
                    "UPDATE runs SET ended = ?, outcome = 'finished', result = ?, result_size = "
                    "? WHERE run = ?"
                ),
                (now, *result, run),
            ),
            ("DELETE FROM masks WHERE run = ?", (run,)),
        )

    def finish_node(self, run: str, node: str) -> None:
        """Record that a node has its personal model."""
        self._commit(
            "finished", ("UPDATE members SET finished = 1 WHERE run = ? AND node = ?", (run, node))
        )

    def abort(self, run: str) -> None:
        """Record that the operator has ended the run early."""
        self._commit(
            "aborted",
            ("UPDATE runs SET ended = ?, outcome = 'aborted' WHERE run = ?", (_now(), run)),
        )

    def has_contributed(self, run: str, round_: int, node: str) -> bool:
        """Whether a contribution of this node to this round is recorded."""
        with self._errors():
            found = self._db.execute(
                "SELECT 1 FROM contributions WHERE run = ? AND round = ? AND node = ?",
                (run, round_, node),
            ).fetchone()
        return found is not None

    def newest_contribution(self, run: str, node: str) -> int:
        """The newest round that a contribution of this node is recorded to; 0 if there is none."""
        with self._errors():
            (newest,) = self._db.execute(
                "SELECT max(round) FROM contributions WHERE run = ? AND node = ?", (run, node)
            ).fetchone()
        return int(newest or 0)

    def contribution_totals(self, run: str) -> list[ContributionTotal]:
        """The contributions of each node to a run, in total."""
        with self._errors():
            rows = self._db.execute(
                "SELECT node, max(round), weight, sum(bytes) FROM contributions "
                "WHERE run = ? GROUP BY node",
                (run,),
            )  # beside max(), SQLite takes the other columns from the row that has it
            return [ContributionTotal(*row) for row in rows]

    def facts(self) -> list[Fact]:
        """All that is settled, in order."""
        with self._errors():
            return list(_facts(self._db))

    def facts_since(self, run: str, round_: int) -> list[Fact]:
        """What is settled of a run from the end of a round on; of round 0,
        that it has begun, too.
        """
        with self._errors():
            return list(facts_of_run(self._db, run, round_))

    def latest(self) -> Run | None:
        """State of the newest run; None if there is none."""
        with self._errors():
            return _latest(self._db)

    def _commit(self, kind: str, *statements: Statement) -> None:
        """Write a fact in one transaction; every fact goes through here."""
        assert kind in TRANSITIONS
        self._write(*statements)


def has_run(folder: Path) -> bool:
    """Whether a run was begun in a coordinator's state folder.

    EdgeNodeError if that cannot be read.
    """
    path = folder / Journal.FILE
    if not path.exists() or not path.stat().st_size:
        return False
    with _reading(folder) as database:
        return database.execute(_LATEST.format("run")).fetchone() is not None


def newest_run(folder: Path) -> Run:
    """The newest run in a coordinator's state folder.

    Raises:
        UsageError: there is no journal in `folder`, or no run in it.
        EdgeNodeError: the journal cannot be read.
    """
    with _reading(folder) as database:
        found = _latest(database)
    if found is None:
        raise UsageError(
            f"the journal in {folder} holds no run",
            "start edge-node coordinate with this --state folder",
        )
    return found


def history(folder: Path) -> list[ClosedRound]:
    """The closed rounds of the newest run in a coordinator's state folder, in order.

    Raises:
        UsageError: there is no journal in `folder`.
        EdgeNodeError: it cannot be read.
    """
    with _reading(folder) as database:
        rows = database.execute(
            "SELECT run, round, opened, closed, node, weight, bytes FROM contributions "
            "JOIN rounds USING (run, round) WHERE closed IS NOT NULL AND run = (SELECT run "
            "FROM runs ORDER BY rowid DESC LIMIT 1) ORDER BY round, node"
        )
        closed_rounds: dict[int, ClosedRound] = {}
        for run, round_, opened, closed, node, weight, size in rows:
            known = closed_rounds.get(round_, ClosedRound(run, round_, {}, 0, opened, closed))
            closed_rounds[round_] = msgspec.structs.replace(
                known, weights={**known.weights, node: weight}, bytes=known.bytes + size
            )
    return list(closed_rounds.values())


def runs(folder: Path) -> list[RunRecord]:
    """All runs in a coordinator's state folder, the newest last;
    the journal as a whole is not verified.

    Raises: as `history`.
    """
    with _reading(folder, verify=False) as database:
        finished: dict[str, set[str]] = defaultdict(set)
        for run, node in database.execute("SELECT run, node FROM members WHERE finished"):
            finished[run].add(node)
        rows = database.execute("SELECT run, spec, begun, ended, outcome FROM runs ORDER BY rowid")
        return [
            RunRecord(_decode_spec(run, spec), begun, ended, outcome, frozenset(finished[run]))
            for run, spec, begun, ended, outcome in rows
        ]


def rounds_since(folder: Path, run: str, first: int) -> list[RoundRecord]:
    """The rounds of a run from `first` on, in order; the journal as a whole is not verified.

    Raises: as `history`.
    """
    with _reading(folder, verify=False) as database:
        rows = database.execute(
            "SELECT round, opened, closed FROM rounds WHERE run = ? AND round >= ? ORDER BY round",
            (run, first),
        )
        found = {round_: RoundRecord(round_, opened, closed, {}) for round_, opened, closed in rows}
        for round_, node, weight, size in database.execute(
            "SELECT round, node, weight, bytes FROM contributions WHERE run = ? AND round >= ?",
            (run, first),
        ):
            found[round_].contributions[node] = weight, size
    return list(found.values())


def settled(folder: Path) -> list[Fact]:
    """All that is settled of all runs in a coordinator's state folder, in order.

    Raises: as `history`.
    """
    with _reading(folder) as database:
        return list(_facts(database))


def _facts(database: sqlite3.Connection) -> Iterator[Fact]:
    for (run,) in database.execute("SELECT run FROM runs ORDER BY rowid").fetchall():
        yield from facts_of_run(database, run)


def _reading(folder: Path, *, verify: bool = True) -> AbstractContextManager[sqlite3.Connection]:
    return reading(folder / Journal.FILE, "edge-node coordinate", verify=verify)


def _latest(database: sqlite3.Connection) -> Run | None:
    row = database.execute(
        _LATEST.format("run, spec, digest, size, outcome, result, result_size")
    ).fetchone()
    if row is None:
        return None
    run, encoded, digest, size, outcome, result, result_size = row
    first = Blob(digest, size)
    spec = _decode_spec(run, encoded)
    opened = database.execute(
        "SELECT round, digest, size, drawn FROM rounds WHERE run = ? ORDER BY round DESC LIMIT 1",
        (run,),
    ).fetchone()
    round_ = 0
    drawn = b"[]"
    if result is not None:
        round_ = spec.rounds + 1
        digest = result
        size = result_size
    elif opened is not None:
        round_, digest, size, drawn = opened
    contributions = database.execute(
        "SELECT node, weight, digest FROM contributions WHERE run = ? AND round = ?", (run, round_)
    )
    members = database.execute(
        "SELECT node, identity, finished FROM members WHERE run = ?", (run,)
    ).fetchall()
    return Run(
        spec,
        outcome,
        round_,
        Blob(digest, size),
        msgspec.json.decode(drawn, type=tuple[str, ...]),
        tuple(Contribution(*each) for each in contributions),
        {node: identity for node, identity, _ in members},
        frozenset(node for node, _, finished in members if finished),
        first,
    )


def _decode_spec(run: str, encoded: bytes) -> Spec:
    try:
        return decode(encoded, Spec)
    except DecodeError as error:  # an earlier version wrote it
        raise UsageError(f"the spec of run {run} cannot be read: {error}", REMEDY) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
