"""Published status of a federation: its round, and an overview of the nodes."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING

import msgspec

from broker_config.protocol import topics
from broker_config.protocol.codec import MAX_MESSAGE
from broker_config.protocol.messages import (
    Delta,
    Manifest,
    NodeState,
    Overview,
    RoundState,
    Spec,
    Work,
)
from trainer.federation.server.coordinator.round_state import Federation, Status
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
class _NodeRecord:
    """Knowledge of this process about a node."""

    doing: Work = "waiting"
    done: int = 0  # bytes
    total: int = 0  # bytes
    round: int = 0
    weight: float | None = None
    bytes: int = 0
    heard: float | None = None  # when it last sent something, by our clock
    error: str = ""
    lost: bool = False
    refused: bool = False


def round_message(
    spec: Spec, state: Federation, broadcast: Manifest, delta: Delta | None = None
) -> RoundState:
    """The message with the state of the round, and the blob that nodes start from."""
    here = len(state.missing | state.contributed)
    needed = state.plan.quorum
    short = (
        f"paused: {here} of the {needed} nodes that a round needs are there" if state.paused else ""
    )
    has_begun = state.status is not Status.GATHERING
    broadcast_or_none = broadcast if has_begun else None
    reason = "paused by the federation's operator" if state.held else short
    delta_or_none = delta if has_begun else None
    return RoundState(
        run=spec.run,
        round=state.round,
        status=state.stage,
        broadcast=broadcast_or_none,
        reason=reason,
        participants=tuple(sorted(state.drawn)),
        delta=delta_or_none,
    )


def aborted_message(spec: Spec, round_: int, reason: str) -> RoundState:
    """The message with which a run ends early."""
    return RoundState(run=spec.run, round=min(round_, spec.rounds), status="aborted", reason=reason)


class StatusTracker:
    """Collects events, and makes an overview of them when there is something new.

    The clock counts seconds. Expiry dates of certificates come from the member list, if there is
    one.
    """

    def __init__(
        self,
        spec: Spec,
        clock: Callable[[], float] = time.monotonic,
        *,
        member_list: "MemberList | None" = None,
    ):
        self._spec = spec
        self._clock = clock
        self._members = member_list.nodes if member_list else {}
        self._nodes: dict[str, _NodeRecord] = {}
        # overview: when, and of which state
        self._newest: tuple[float, Federation | None] = (-inf, None)
        self._changed = True
        self._opened = clock()  # the round

    def restore(self, node: str, round_: int, weight: float, size: int) -> None:
        """Restore what a node contributed before this process began: its newest round,
        its weight then, all bytes.
        """
        record = self._nodes.setdefault(node, _NodeRecord())
        record.round = round_
        record.weight = weight
        record.bytes = size

    def record(self, event: AnyEvent) -> None:
        """Record an event of this federation."""
        match event:
            case RoundOpened():
                self._opened = self._clock()
            case NodeJoined(node=node):
                record = self._nodes.setdefault(node, _NodeRecord())
                record.doing = "waiting"
                record.done = 0
                record.total = 0
                record.refused = record.lost = False
                self.record_message(node)
            case Activity(node=node) if node in self._nodes:
                record = self._nodes[node]
                if event.done > record.done:
                    self.record_message(node)
                record.doing = event.what
                record.done = event.done
                record.total = event.total
            case Contribution(node=node) if node in self._nodes:
                record = self._nodes[node]
                record.round = event.round
                record.weight = event.weight
                record.bytes = record.bytes + event.bytes
                if not record.lost:  # else it came from a node that has gone since
                    record.error = ""
            case Late(node=node) if node in self._nodes:
                self._nodes[
                    node
                ].error = f"round {event.round}: it contributed too late, and was not counted"
            case NodeLost(node=node) if node in self._nodes:
                record = self._nodes[node]
                record.error = f"round {event.round}: its connection ended"
                record.lost = True
            # else the overview could not be read
            case NodeRefused(node=node) if topics.is_name(node):
                record = self._nodes.pop(node, _NodeRecord())  # the newest come last
                record.error = f"round {event.round}: {event.reason}"[:_LONGEST_ERROR]
                record.refused = True
                self._nodes[node] = record
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

        def observe(event: AnyEvent) -> None:
            self.record(event)
            report(event)

        return observe

    def next_overview(
        self, state: Federation, finished: Collection[str], *, anyway: bool = False
    ) -> Overview | None:
        """An overview, if anything has changed since the last one, and that is not too recent.

        If there are more nodes than a message holds, it lists the most urgent ones, and counts the
        others.

        Args:
            state: the state of the round.
            finished: nodes that have their model.
            anyway: also when nothing has changed.
        """
        now = self._clock()
        (when, newest) = self._newest
        if not anyway and (now - when < EVERY or not (self._changed or state is not newest)):
            return None
        self._newest = (now, state)
        self._changed = False
        self._drop_strangers(state)
        names = sorted({*state.members, *self._nodes})
        nodes = sorted((self._node(name, state, finished) for name in names), key=_urgency)
        listed = _select_fitting(nodes)
        return Overview(
            run=self._spec.run,
            time=datetime.now(UTC),
            round=state.round,
            rounds=self._spec.rounds,
            status=state.stage,
            paused=state.paused or state.held,
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
        record = self._nodes.get(name, _NodeRecord())
        open_ = state.status is Status.OPEN
        present = name in state.present
        due = (
            open_
            and name in state.members
            and state.takes_part(name)
            and name not in state.contributed
        )
        doing = _doing(
            record, present=present, finished=name in finished, late=due and state.expired
        )
        travels = doing == "sending"
        done = record.done if travels else 0
        total = record.total if travels else 0
        round_ = state.round if open_ and name in state.contributed else record.round
        weight = record.weight if self._spec.encryption == "none" else None
        heard = (
            None if record.heard is None else min(round(self._clock() - record.heard, 1), _LONGEST)
        )
        expires = self._members[name].expires if name in self._members else None
        return NodeState(
            node=name,
            doing=doing,
            awaited=due and (present or state.paused) and not record.refused,
            done=done,
            total=total,
            round=round_,
            # of what is learnt: it says something
            weight=weight,
            bytes=record.bytes,
            heard=heard,
            error=record.error,
            expires=expires,
        )

    def _drop_strangers(self, state: Federation) -> None:
        strangers = [
            name
            for name, record in self._nodes.items()
            if record.refused and name not in state.present
        ]
        for name in strangers[:-_STRANGERS]:
            del self._nodes[name]


def _doing(record: _NodeRecord, *, present: bool, finished: bool, late: bool) -> Work:
    if record.refused:
        return "refused"
    if finished:
        return "finished"
    if not present:
        return "absent"
    return "late" if late and record.doing != "sending" else record.doing


def _urgency(node: NodeState) -> tuple[bool, bool]:
    return (not node.awaited, not node.error)


def _select_fitting(nodes: list[NodeState]) -> list[NodeState]:
    """The first ones, up to a message's size."""
    room = _ROOM
    count = 0
    for node in nodes:
        room -= len(msgspec.json.encode(node)) + 1
        if room < 0:
            break
        count += 1
    return nodes[:count]
