"""Published state of a federation: its round, and an overview of what is known of each node."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING

import msgspec

from broker_config.protocol import topics
from broker_config.protocol.codec import MAX_MESSAGE
from broker_config.protocol.messages import Manifest, NodeState, Overview, RoundState, Spec, Work
from trainer.federation.server.round_state import Federation, Status
from trainer.progress import (
    Activity,
    AnyEvent,
    Contribution,
    Late,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Report,
    RoundOpened,
)

if TYPE_CHECKING:
    from broker_config.security.member_list import MemberList

EVERY = 1.0  # seconds between two overviews, at least
_ROOM = MAX_MESSAGE - 1024  # bytes for nodes; the rest of an overview needs less
_LONGEST_ERROR = 200  # characters
_LONGEST = 1e7  # seconds
_STRANGERS = 16  # refused names that hold no place; anybody can make them up


@dataclass
class _Noted:
    """What this process knows of a node."""

    doing: Work = "waiting"
    done: int = 0  # bytes
    total: int = 0  # bytes
    round: int = 0
    weight: float | None = None
    bytes: int = 0
    heard: float | None = None  # by our clock
    error: str = ""
    lost: bool = False
    refused: bool = False


def round_message(spec: Spec, state: Federation, broadcast: Manifest) -> RoundState:
    """Where a federation stands, and the blob that nodes start from."""
    here, needed = len(state.missing | state.contributed), state.plan.quorum
    return RoundState(
        run=spec.run,
        round=state.round,
        status=state.status.value,
        broadcast=None if state.status is Status.GATHERING else broadcast,
        reason=f"paused: {here} of the {needed} nodes that a round needs are there" if state.paused else "",
        participants=tuple(sorted(state.drawn)),
    )


class StatusTracker:
    """Collects what happens, and makes an overview of it when there is something new.

    The clock counts seconds. Where there is a charter, it tells when the nodes' certificates end.
    """

    def __init__(self, spec: Spec, clock: Callable[[], float] = time.monotonic, *, charter: "MemberList | None" = None):
        self._spec, self._clock = spec, clock
        self._members = charter.nodes if charter else {}
        self._nodes: dict[str, _Noted] = {}
        self._told: tuple[float, Federation | None] = (-inf, None)  # when last, and of which state
        self._changed = True
        self._opened = clock()  # the round

    def restore(self, node: str, round_: int, weight: float, size: int) -> None:
        """Restore what a node contributed before this process began: its newest round, its weight then, all bytes."""
        noted = self._nodes.setdefault(node, _Noted())
        noted.round, noted.weight, noted.bytes = round_, weight, size

    def record(self, event: AnyEvent) -> None:
        """Record an event of this federation."""
        match event:
            case RoundOpened():
                self._opened = self._clock()
            case NodeJoined(node=node):
                noted = self._nodes.setdefault(node, _Noted())
                noted.doing, noted.done, noted.total = "waiting", 0, 0
                noted.refused = noted.lost = False
                self.record_message(node)
            case Activity(node=node) if node in self._nodes:
                noted = self._nodes[node]
                if event.done > noted.done:
                    self.record_message(node)
                noted.doing, noted.done, noted.total = event.what, event.done, event.total
            case Contribution(node=node) if node in self._nodes:
                noted = self._nodes[node]
                noted.round, noted.weight, noted.bytes = event.round, event.weight, noted.bytes + event.bytes
                if not noted.lost:  # else it came from a node that has gone since
                    noted.error = ""
            case Late(node=node) if node in self._nodes:
                self._nodes[node].error = f"round {event.round}: it contributed too late, and was not counted"
            case NodeLost(node=node) if node in self._nodes:
                noted = self._nodes[node]
                noted.error, noted.lost = f"round {event.round}: its connection ended", True
            case NodeRefused(node=node) if topics.is_name(node):  # else the overview could not be read
                noted = self._nodes.pop(node, _Noted())  # the newest come last
                noted.error, noted.refused = f"round {event.round}: {event.reason}"[:_LONGEST_ERROR], True
                self._nodes[node] = noted
            case _:
                return
        self._changed = True

    def record_message(self, node: str) -> None:
        """Record that a node has sent something."""
        if node in self._nodes:
            self._nodes[node].heard = self._clock()
            self._changed = True

    def observing(self, report: Report) -> Report:
        """A report that records events before it passes them on."""

        def tell(event: AnyEvent) -> None:
            self.record(event)
            report(event)

        return tell

    def next_overview(self, state: Federation, finished: Collection[str], *, anyway: bool = False) -> Overview | None:
        """How the federation is doing, if anything has changed since that was asked, and it was not too recent.

        Of more nodes than a message holds, the most urgent ones and a count.

        Args:
            state: of the round.
            finished: nodes that have their model.
            anyway: also when nothing has changed.
        """
        now, (when, told) = self._clock(), self._told
        if not anyway and (now - when < EVERY or not (self._changed or state is not told)):
            return None
        self._told, self._changed = (now, state), False
        self._forget_strangers(state)
        names = sorted({*state.members, *self._nodes})
        nodes = sorted((self._node(name, state, finished) for name in names), key=_urgency)
        listed = _that_fit(nodes)
        return Overview(
            run=self._spec.run,
            time=datetime.now(UTC),
            round=state.round,
            rounds=self._spec.rounds,
            status=state.status.value,
            paused=state.paused,
            contributions=len(state.contributed),
            quorum=state.plan.quorum,
            left=self._left(state),
            nodes=tuple(listed),
            more=len(nodes) - len(listed),
        )

    def _left(self, state: Federation) -> float | None:
        """Seconds until the round's deadline."""
        if not self._spec.deadline or state.status is not Status.OPEN:
            return None
        return max(0.0, self._spec.deadline - (self._clock() - self._opened))

    def _node(self, name: str, state: Federation, finished: Collection[str]) -> NodeState:
        noted = self._nodes.get(name, _Noted())
        open_, present = state.status is Status.OPEN, name in state.present
        due = open_ and name in state.members and state.takes_part(name) and name not in state.contributed
        doing = _doing(noted, present=present, finished=name in finished, late=due and state.expired)
        travels = doing == "sending"
        return NodeState(
            node=name,
            doing=doing,
            awaited=due and (present or state.paused or not state.waited) and not noted.refused,
            done=noted.done if travels else 0,
            total=noted.total if travels else 0,
            round=state.round if open_ and name in state.contributed else noted.round,
            weight=noted.weight,
            bytes=noted.bytes,
            heard=None if noted.heard is None else min(round(self._clock() - noted.heard, 1), _LONGEST),
            error=noted.error,
            expires=self._members[name].expires if name in self._members else None,
        )

    def _forget_strangers(self, state: Federation) -> None:
        strangers = [name for name, noted in self._nodes.items() if noted.refused and name not in state.present]
        for name in strangers[:-_STRANGERS]:
            del self._nodes[name]


def _doing(noted: _Noted, *, present: bool, finished: bool, late: bool) -> Work:
    if noted.refused:
        return "refused"
    if finished:
        return "finished"
    if not present:
        return "absent"
    return "late" if late and noted.doing != "sending" else noted.doing


def _urgency(node: NodeState) -> tuple[bool, bool]:
    return (not node.awaited, not node.error)


def _that_fit(nodes: list[NodeState]) -> list[NodeState]:
    """The first ones, up to a message's size."""
    room, count = _ROOM, 0
    for node in nodes:
        room -= len(msgspec.json.encode(node)) + 1
        if room < 0:
            break
        count += 1
    return nodes[:count]
