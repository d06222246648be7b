"""Who may speak for a node: places, identities, sessions; who owes a sign of life, who talks too much. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from broker_config.protocol.messages import Hello, Refusal
from broker_config.protocol.vfl_messages import VflHello

GRACE = 60.0  # seconds for a sign of life after we were away: brokers notice a loss after 30, clients retry after 10
WINDOW = 10.0  # seconds over which messages are counted
MAX_MESSAGES = 2000  # messages of a node in a window; a federation needs a few a round
HELLO_COST = 20  # messages as which a Hello counts: each has an answer, and may be written down
STRIKES = 3  # times that a node is refused before it is not let in again
_NAMES = 10_000  # senders that are told apart


class Peer(NamedTuple):
    """The process that speaks for a node."""

    session: str
    incarnation: int


class Membership:
    """The nodes of one coordinator's process. Times are seconds of any monotonic clock."""

    def __init__(self, places: int, identities: Mapping[str, str]):
        self._places = places
        self._identities = identities  # of those who hold a place; the owner's, who writes them down
        self._peers: dict[str, Peer] = {}
        self._doubted: dict[str, float] = {}  # until when a node has to be heard
        self._window = 0.0
        self._talk: Counter[str] = Counter()
        self._strikes: Counter[str] = Counter()
        self._told: set[tuple[object, ...]] = set()

    def session(self, node: str) -> str | None:
        """The session that speaks for a node."""
        peer = self._peers.get(node)
        return peer.session if peer else None

    def is_stale(self, node: str, hello: Hello | VflHello) -> bool:
        """Whether a newer process of the same state folder has spoken already: the message was under way for long."""
        peer = self._peers.get(node)
        return peer is not None and self._is_same(node, hello) and hello.incarnation < peer.incarnation

    def find_objection(self, node: str, hello: Hello | VflHello, run: str, *, present: bool) -> Refusal | None:
        """Why a node may not take part; None if it may."""

        def refusal(reason: str, remedy: str) -> Refusal:
            return Refusal(session=hello.session, reason=reason[:2000], remedy=remedy)

        if hello.run != run:
            return refusal("that run of the federation is over", "run edge-node join again")
        if self._strikes[node] >= STRIKES:
            return refusal(
                f"{node!r} was refused {STRIKES} times",
                "find the reason with the coordinator's operator, who can let it in again by a restart",
            )
        if node in self._identities:
            same = self._is_same(node, hello) or self.session(node) == hello.session
            if present and not same:
                return refusal(
                    f"the name {node!r} is taken by a connected node",
                    "stop that one, or choose another name; if it has just gone, or lost its state, wait a minute",
                )
        elif len(self._identities) >= self._places:
            names = ", ".join(sorted(self._identities))
            return refusal(
                f"the federation is full: its {self._places} nodes are {names}",
                "ask the coordinator's operator for more --nodes",
            )
        return None

    def admit(self, node: str, hello: Hello | VflHello) -> None:
        """From now on the sender of `hello` speaks for the node."""
        self._peers[node] = Peer(hello.session, hello.incarnation)
        self.confirm(node)

    def expel(self, node: str) -> str | None:
        """The node is refused: nobody speaks for it any more. Returns the session that did."""
        self.confirm(node)
        peer = self._peers.pop(node, None)
        if peer is None:
            return None
        self._strikes[node] += 1
        self._told.discard(("refused", node))
        return peer.session

    def expect_answers(self, nodes: Collection[str], now: float) -> None:
        """We were away, and cannot know who of these has left meanwhile: each has to be heard of soon."""
        self._doubted = dict.fromkeys(nodes, now + GRACE)

    def confirm(self, node: str) -> None:
        """A sign of life."""
        self._doubted.pop(node, None)

    def pop_silent(self, now: float) -> list[str]:
        """Nodes that were not heard of in time; each is named once."""
        gone = [node for node, until in self._doubted.items() if until < now]
        for node in gone:
            self.confirm(node)
        return gone

    def is_flooding(self, node: str, now: float, count: int = 1) -> bool:
        """Count a message, or what it is worth; whether its sender has sent too many lately."""
        if now - self._window > WINDOW or len(self._talk) > _NAMES:
            self._window, self._talk = now, Counter()
        self._talk[node] += count
        return self._talk[node] > MAX_MESSAGES

    def is_first_report(self, *told: object) -> bool:
        """Whether this is told for the first time. A sender's refusals are, once each time that it was let in."""
        if told in self._told:
            return False
        if len(self._told) > _NAMES:
            self._told.clear()
        self._told.add(told)
        return True

    def _is_same(self, node: str, hello: Hello | VflHello) -> bool:
        """Whether a Hello comes from the state folder that holds the place, or cannot be told from it."""
        if self._identities.get(node) != hello.identity:
            return False
        return bool(hello.identity) or self.session(node) in (None, hello.session)
