"""Facts of a coordinator's hash-chained record: runs that begin and end, rounds that close.

Computed from the journal.

Nothing of the record is stored: it is a function of rows that are never changed once they are
settled, so no kill can come between a fact and its entry. What is computed here must stay the same,
to the byte, in every later version, or heads that others keep would fit no more: fields may be
added with a default, which is left out.
"""

import sqlite3
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.messages import Digest, Name, Round, RunId

Moment = Annotated[
    str, Meta(pattern=r"^\d{4}-\d\d-\d\dT[\d:.]{8,15}(\+00:00|Z)\Z", description="ISO 8601, UTC")
]


class _Fact(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="what"):
    """Base of facts."""

    run: RunId


class RunBegun(_Fact, frozen=True, kw_only=True, tag="run begun"):
    """A run: what was agreed on, and the tensors that it starts from."""

    time: Moment
    spec: dict[str, Any]  # a Spec as it was written; a later version would add its defaults
    broadcast: Digest


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a member contributed to a round."""

    weight: float  # as the member measured it
    digest: Digest | None = None  # of its tensors, decoded; None where the method sends none
    bytes: int = 0  # that travelled


class RoundClosed(_Fact, frozen=True, kw_only=True, tag="round closed"):
    """A round: what members received, who of them contributed what.

    The next broadcast was made of these.
    """

    round: Round
    opened: Moment
    closed: Moment
    broadcast: Digest
    drawn: tuple[Name, ...] = ()  # members that were to take part; empty: all
    contributions: dict[Name, Part]


class RunEnded(_Fact, frozen=True, kw_only=True, tag="run ended"):
    """The end of a run, and its result."""

    time: Moment
    outcome: Literal["finished", "aborted"]
    result: Digest | None = None


Fact = RunBegun | RoundClosed | RunEnded


def as_entry(fact: Fact) -> dict[str, Any]:
    """A fact as it stands in an entry."""
    entry: dict[str, Any] = msgspec.to_builtins(fact)
    return entry


def facts_of_run(database: sqlite3.Connection, run: str, since: int = 0) -> Iterator[Fact]:
    """What is settled of a run from the end of round `since` on; of round 0,
    that it has begun, too.
    """
    spec, digest, begun, ended, outcome, result = database.execute(
        "SELECT spec, digest, begun, ended, outcome, result FROM runs WHERE run = ?", (run,)
    ).fetchone()
    if since == 0:
        yield RunBegun(run=run, time=begun, spec=msgspec.json.decode(spec), broadcast=digest)
    rows = database.execute(
        "SELECT round, node, weight, digest, bytes FROM contributions"
        " WHERE run = ? AND round >= ? ORDER BY round, node",
        (run, since),
    )
    parts: dict[int, dict[str, Part]] = {}
    for round_, node, weight, digest, size in rows:
        part = Part(weight=weight, digest=digest, bytes=size)
        parts.setdefault(round_, {})[node] = part
    for round_, digest, drawn, opened, closed in database.execute(
        "SELECT round, digest, drawn, opened, closed FROM rounds"
        " WHERE run = ? AND round >= ? AND closed IS NOT NULL ORDER BY round",
        (run, since),
    ):
        yield RoundClosed(
            run=run,
            round=round_,
            opened=opened,
            closed=closed,
            broadcast=digest,
            drawn=msgspec.json.decode(drawn, type=tuple[str, ...]),
            contributions=parts.get(round_, {}),
        )
    if outcome:
        yield RunEnded(run=run, time=ended, outcome=outcome, result=result)
