"""Membership of a federation: places, identities, sessions,
overdue answers to roll calls, message rates. Pure.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from broker_config.protocol.messages import Hello, Refusal

# seconds to answer a roll call, and between two: brokers notice a loss after 30, clients retry
# after 10
GRACE = 60.0
WINDOW = 10.0  # seconds over which messages are counted
MAX_MESSAGES = 2000  # messages of a node in a window; a federation needs a few a round
HELLO_COST = 20  # messages that a Hello counts for: each is answered and may be written down
STRIKES = 3  # times that a node is refused before it is not let in again
_NAMES = 10_000  # senders that are counted one by one


class AnyHello(Protocol):
    """A member's request to take part, in a federation of any kind."""

    @property
    def session(self) -> str:
        """Of the process that asks."""
        ...

    @property
    def run(self) -> str:
        """The run that it means."""
        ...

    @property
    def software(self) -> str:
        """Its version."""
        ...

    @property
    def identity(self) -> str:
        """Of its state folder; empty if it tells none."""
        ...

    @property
    def incarnation(self) -> int:
        """How many processes have used that folder."""
        ...

    @property
    def revision(self) -> int:
        """Of the protocol, that it knows."""
        ...


class Peer(NamedTuple):
    """The process that speaks for a node."""

    session: str
    incarnation: int


class Membership:
    """The members of one server process. Times are seconds of any monotonic clock."""

    def __init__(self, places: int, identities: Mapping[str, str]):
        self._places = places
        self._identities = identities  # of those who hold a place; the owner writes them down
        self._peers: dict[str, Peer] = {}
        self._replaced: dict[str, None] = {}  # sessions that have spoken for a node, oldest first
        self._overdue: dict[str, float] = {}  # when a node must have answered the roll call
        self._window = 0.0
        self._counts: Counter[str] = Counter()
        self._strikes: Counter[str] = Counter()
        self._reported: set[tuple[object, ...]] = set()

    def session(self, node: str) -> str | None:
        """The session that speaks for a node."""
        peer = self._peers.get(node)
        return peer.session if peer else None

    def is_stale(self, node: str, hello: AnyHello, *, present: bool) -> bool:
        """Whether this Hello was delayed, and a newer process of the same state folder speaks
        for the node.

        One that has gone was the newest, but its folder may since have been restored from a copy:
        then a process is let in that counts fewer before it. What is left behind by a session that
        has spoken before stays stale.
        """
        peer = self._peers.get(node)
        if peer is None or hello.session == peer.session or not self._is_same(node, hello):
            return False
        return hello.session in self._replaced or (present and hello.incarnation < peer.incarnation)

    def find_objection(
        self,
        node: str,
        hello: AnyHello,
        run: str,
        *,
        present: bool,
        newcomer: bool = False,
        needs_key: bool = False,
        needs_masks: bool = False,
        needs_revision: int = 0,
    ) -> Refusal | None:
        """Why a node may not take part; None if it may.

        A newcomer to a finished run takes no place.

        Where messages are encrypted a node `needs_key`s, or could read nothing; and where only sums
        are to be read it `needs_masks`, or would send what nobody else hides. What a run does may
        need a revision of the protocol.
        """

        def refusal(reason: str, remedy: str) -> Refusal:
            return Refusal(session=hello.session, reason=reason[:2000], remedy=remedy)

        if hello.run != run:
            return refusal("that run of the federation is over", "run edge-node join again")
        if self._strikes[node] >= STRIKES:
            return refusal(
                f"{node!r} was refused {STRIKES} times",
                "find the reason with the coordinator's operator, who can let it in again by "
                "a restart",
            )
        if needs_key and not (isinstance(hello, Hello) and hello.key):
            return refusal(
                f"this federation's messages are encrypted, and edge-node {hello.software[:50]} "
                "of this node cannot read them",
                "install the coordinator's version of edge-node, then join again; or ask its "
                "operator for a run with --encryption none",
            )
        if needs_masks and not (isinstance(hello, Hello) and hello.masks):
            return refusal(
                "this federation masks what its nodes contribute, and edge-node "
                f"{hello.software[:50]} of this node cannot",
                "install the coordinator's version of edge-node, then join again",
            )
        if hello.revision < needs_revision:
            return refusal(
                f"this federation needs a later edge-node than {hello.software[:50]} of this node",
                "install the coordinator's version of edge-node, then join again",
            )
        if node in self._identities:
            same = self._is_same(node, hello) or self.session(node) == hello.session
            if present and not same:
                return refusal(
                    f"the name {node!r} is taken by a connected node",
                    "stop that one, or take another --name (with kits: another kit); if it has "
                    "just gone, or lost its state, wait a minute",
                )
        elif not newcomer and len(self._identities) >= self._places:
            names = ", ".join(sorted(self._identities))
            return refusal(
                f"the federation is full: its {self._places} nodes are {names}",
                "ask the coordinator's operator for more --nodes",
            )
        return None

    def admit(self, node: str, hello: AnyHello) -> None:
        """Let the sender of `hello` speak for the node from now on."""
        if (before := self._peers.get(node)) and before.session != hello.session:
            self._replaced[before.session] = None
            if len(self._replaced) > _NAMES:
                del self._replaced[next(iter(self._replaced))]
        self._peers[node] = Peer(hello.session, hello.incarnation)
        self.confirm(node)

    def expel(self, node: str) -> str | None:
        """Let nobody speak for the node any more; return the session that did."""
        self.confirm(node)
        peer = self._peers.pop(node, None)
        if peer is None:
            return None
        self._strikes[node] += 1
        self._reported.discard(("refused", node))
        return peer.session

    def expect_answers(self, nodes: Collection[str], now: float) -> None:
        """A roll was called: those of these nodes that have left meanwhile will not answer in
        time.
        """
        self._overdue = dict.fromkeys(nodes, now + GRACE)

    def confirm(self, node: str) -> None:
        """A node has answered, or is known to be gone."""
        self._overdue.pop(node, None)

    def pop_silent(self, now: float) -> list[str]:
        """Nodes that have not answered in time; each is returned once."""
        gone = [node for node, until in self._overdue.items() if until < now]
        for node in gone:
            self.confirm(node)
        return gone

    def is_flooding(self, node: str, now: float, count: int = 1) -> bool:
        """Count a message that stands for `count`; whether its sender has sent too many lately."""
        if now - self._window > WINDOW or len(self._counts) > _NAMES:
            self._window = now
            self._counts = Counter()
        self._counts[node] += count
        return self._counts[node] > MAX_MESSAGES

    def is_first_report(self, *what: object) -> bool:
        """Whether this is reported for the first time; a refusal,
        for the first time since the node was admitted.
        """
        if what in self._reported:
            return False
        if len(self._reported) > _NAMES:
            self._reported.clear()
        self._reported.add(what)
        return True

    def _is_same(self, node: str, hello: AnyHello) -> bool:
        """Whether a Hello comes from the state folder that holds the place,
        or cannot be told from it.
        """
        if self._identities.get(node) != hello.identity:
            return False
        return bool(hello.identity) or self.session(node) in (None, hello.session)
