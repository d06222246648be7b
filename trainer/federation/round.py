"""The round as a pure state machine: (state, event) -> (state, effects). No MQTT, no clock, no files."""

from enum import StrEnum
from typing import NamedTuple


class Status(StrEnum):
    """Where a federation stands; the words of RoundState.status."""

    GATHERING = "gathering"
    OPEN = "open"
    FINISHED = "finished"


class Plan(NamedTuple):
    """What is agreed before the first round."""

    nodes: int  # that the first round waits for
    quorum: int  # contributions that suffice to close a round when nobody present is still to contribute
    rounds: int


class Federation(NamedTuple):
    """The state. `present` and `contributed` hold node names."""

    plan: Plan
    status: Status = Status.GATHERING
    round: int = 0
    present: frozenset[str] = frozenset()
    contributed: frozenset[str] = frozenset()

    @property
    def missing(self) -> frozenset[str]:
        """Nodes that are present and have yet to contribute to the open round."""
        return self.present - self.contributed


class Joined(NamedTuple):
    """A node takes part, for the first time or again."""

    node: str


class Left(NamedTuple):
    """A node's connection ended, or it was refused."""

    node: str


class Contributed(NamedTuple):
    """A node's contribution to the open round is summed and on disk."""

    node: str


Event = Joined | Left | Contributed


class Open(NamedTuple):
    """Broadcast, and let the nodes train."""

    round: int


class Close(NamedTuple):
    """Average what came."""

    round: int
    contributors: frozenset[str]


class Finish(NamedTuple):
    """The last round is closed."""


class Pause(NamedTuple):
    """Fewer nodes are present or have contributed than the quorum: the round waits for more to come."""

    round: int


Effect = Open | Close | Finish | Pause


def advance(state: Federation, event: Event) -> tuple[Federation, tuple[Effect, ...]]:
    """The next state and what has to be done, in order."""
    if state.status is Status.FINISHED:
        return state, ()
    match event:
        case Joined(node):
            return _settle(state._replace(present=state.present | {node}))
        case Left(node):
            return _settle(state._replace(present=state.present - {node}), lost=True)
        case Contributed(node):
            if state.status is not Status.OPEN or node in state.contributed:
                return state, ()
            return _settle(state._replace(contributed=state.contributed | {node}))


def _settle(state: Federation, *, lost: bool = False) -> tuple[Federation, tuple[Effect, ...]]:
    plan = state.plan
    if state.status is Status.GATHERING:
        return _open(state, 1) if len(state.present) >= plan.nodes else (state, ())
    if not state.missing and len(state.contributed) >= plan.quorum:
        close = Close(state.round, state.contributed)
        if state.round == plan.rounds:
            return state._replace(status=Status.FINISHED), (close, Finish())
        state, effects = _open(state, state.round + 1)
        return state, (close, *effects)
    reachable = len(state.present | state.contributed)
    return state, (Pause(state.round),) if lost and reachable < plan.quorum else ()


def _open(state: Federation, round_: int) -> tuple[Federation, tuple[Effect, ...]]:
    return state._replace(status=Status.OPEN, round=round_, contributed=frozenset()), (Open(round_),)
