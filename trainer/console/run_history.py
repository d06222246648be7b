"""History of one run as the console tells it:
rounds with a value of each measure for each node, and messages.

It grows, and each change has a number: whoever has seen some of it asks for what is newer.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Literal

from msgspec import Struct, field

from broker_config.protocol.messages import Option

MOST_MEASURES = 32  # by name; a node may make names up
MOST_MESSAGES = 500  # the newest
_LONGEST = 500  # characters of a message

Stage = Literal["gathering", "open", "finished", "aborted"]
Kind = Literal["error", "warning", "note"]


class Measure(Struct, frozen=True):
    """What is measured at each node in each round, or of each round as a whole,
    and how a chart explains it.
    """

    key: str
    title: str = ""  # empty: the page has words for it
    meaning: str = ""
    level: tuple[float, str] | None = None  # a value to compare with, and how that is written


class Message(Struct, frozen=True):
    """Something that happened, for people."""

    time: float  # seconds since 1970
    kind: Kind
    node: str  # empty: of no single one
    text: str


class Row(Struct, array_like=True):
    """One round.

    Times are seconds since 1970; values stand in the order of nodes, None where there is none.
    """

    round: int
    opened: float
    closed: float | None = None
    values: dict[str, list[float | None]] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)  # of the round as a whole


class NodeStatus(Struct):
    """A node as it is now."""

    doing: str = "absent"
    since: float = 0.0  # seconds since 1970
    error: str = ""  # the last one


class Description(Struct, frozen=True, kw_only=True):
    """What does not change while a run lasts."""

    id: str
    kind: str  # `federation`, or the name of a further kind of federation
    federation: str
    method: str
    rounds: int  # 0: without end
    places: int  # nodes that take part
    settings: Mapping[str, Option]
    measures: tuple[Measure, ...]
    begun: float


class RunHistory:
    """A run as far as it is known."""

    def __init__(self, about: Description) -> None:
        self.about = about
        self.stage: Stage = "gathering"
        self.begun = about.begun  # 0 if the journal does not tell
        self.ended: float | None = None
        self.paused = False  # it waits for nodes
        self.held = False  # its operator has paused it
        self.newest = 0  # the newest round that has begun
        self.version = 0  # the number of the last change
        self._floor = 0  # the version before which rounds were there that are not any more
        self.nodes: list[str] = []
        self.status: dict[str, NodeStatus] = {}
        self._positions: dict[str, int] = {}  # of the nodes
        self._rows: dict[int, Row] = {}
        self._changed: dict[int, int] = {}  # rounds by the number of their last change
        self._messages: list[tuple[int, Message]] = []
        self._measures = {measure.key: measure for measure in about.measures}

    def touch(self) -> None:
        """Count a change that is in no round."""
        self.version += 1

    def row(self, round_: int, opened: float = 0.0) -> Row:
        """A round that is about to change."""
        self.touch()
        self.newest = max(self.newest, round_)
        self._changed[round_] = self.version
        row = self._rows.setdefault(round_, Row(round_, opened))
        row.opened = opened or row.opened
        return row

    def thin(self, stride: int) -> None:
        """Keep every n-th round."""
        self.touch()
        self._floor = self.version
        for round_ in [each for each in self._rows if each % stride]:
            del self._rows[round_], self._changed[round_]

    def put(self, round_: int, node: str, values: Mapping[str, float]) -> None:
        """Note what was measured at a node in a round; what is no finite number is left out."""
        position = self._position(node)
        row = self.row(round_)
        for key, value in values.items():
            if not isfinite(value) or (
                key not in self._measures and len(self._measures) >= MOST_MEASURES
            ):
                continue
            self._measures.setdefault(key, Measure(key, key))
            known = row.values.setdefault(key, [])
            known.extend([None] * (position + 1 - len(known)))
            known[position] = _short(value)

    def elapsed(self, round_: int, node: str, key: str, time: float) -> None:
        """Note how long after the round's opening a node had done something for the first time."""
        row = self._rows.get(round_)
        position = self._position(node)
        if row is None or not row.opened:
            return
        if position >= len(known := row.values.get(key, [])) or known[position] is None:
            self.put(round_, node, {key: max(0.0, time - row.opened)})

    def come_back(self, node: str) -> None:
        """Note that a node has a part in the newest round again."""
        position = self._position(node)
        if self.newest not in self._rows:
            return
        row = self.row(self.newest)
        for why in ("absent", "refused"):
            known = row.values.get(why, [])
            if position < len(known):
                known[position] = None

    def set_status(self, node: str, doing: str, time: float, error: str = "") -> None:
        """Note what a node does from now on; who has finished has nothing more to do."""
        self._position(node)
        status = self.status[node]
        if status.doing not in (doing, "finished"):
            status.doing = doing
            status.since = time
        status.error = error or status.error
        self.touch()

    def tell(self, time: float, text: str, kind: Kind = "note", node: str = "") -> None:
        """Note a message."""
        self.touch()
        self._messages.append((self.version, Message(time, kind, node, text[:_LONGEST])))
        del self._messages[:-MOST_MESSAGES]

    def overview(self) -> dict[str, Any]:
        """Where the run stands, as values that JSON holds."""
        about = self.about
        return {
            "id": about.id, "kind": about.kind, "federation": about.federation,
            "method": about.method, "rounds": about.rounds, "places": about.places,
            "begun": self.begun, "ended": self.ended, "stage": self.stage, "paused": self.paused,
            "held": self.held, "round": self.newest, "version": self.version,
        }  # fmt: skip

    def since(self, version: int) -> dict[str, Any]:
        """What is newer than this change: all of the nodes,
        and the rounds and messages that have changed.
        """
        everything = not self._floor <= version <= self.version or not version
        chosen: Iterable[int] = (
            self._rows if everything else (n for n, at in self._changed.items() if at > version)
        )
        return {
            **self.overview(),
            "settings": self.about.settings,
            "measures": [*self._measures.values()],
            "nodes": self.nodes,
            "status": [self.status[node] for node in self.nodes],
            "whole": everything,
            "rows": [self._rows[round_] for round_ in sorted(chosen)],
            "messages": [message for at, message in self._messages if everything or at > version],
        }

    def _position(self, node: str) -> int:
        if node not in self._positions:
            self._positions[node] = len(self.nodes)
            self.nodes.append(node)
            self.status[node] = NodeStatus()
        return self._positions[node]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
