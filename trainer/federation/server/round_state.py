"""State machine of a federation's rounds: (state, event) -> (state, effects).

Pure: no MQTT, clock or files.

A round of masked contributions takes nothing more while its sum is unmasked.
"""

from collections.abc import Collection, Set
from enum import StrEnum
from typing import NamedTuple

from broker_config.protocol.messages import Stage
from trainer.seeding import generator


class Status(StrEnum):
    """Stage of a federation."""

    GATHERING = "gathering"
    OPEN = "open"
    # open to its nodes, who have nothing more to do in it but for the masks of their parts
    UNMASKING = "unmasking"
    FINISHED = "finished"


_STAGES: dict[Status, Stage] = {
    Status.GATHERING: "gathering",
    Status.OPEN: "open",
    Status.UNMASKING: "open",
    Status.FINISHED: "finished",
}


class Plan(NamedTuple):
    """Settings that are fixed before the first round."""

    nodes: int  # places
    quorum: int  # contributions without which no round closes
    rounds: int
    sample: int = 0  # nodes drawn for each round; 0: all take part
    seed: int = 0  # of the draw
    # rounds in which all take part, drawn or not: those for statistics
    of_all: frozenset[int] = frozenset()
    is_masked: bool = False  # only the sum of contributions can be read, once they are all there

    @property
    def opening(self) -> int:
        """Nodes that open the first round: a quorum, or all where some are drawn from all."""
        return self.nodes if self.sample else self.quorum


class Admission(StrEnum):
    """Classification of a contribution on arrival."""

    DUE = "due"
    COUNTED = "counted"  # of a node whose contribution to the open round is summed already
    LATE = "late"  # to a closed round: never summed, since the result would depend on delays
    EARLY = "early"  # to a round that is not open
    NOT_DRAWN = "not drawn"


class Federation(NamedTuple):
    """The state. The sets hold node names."""

    plan: Plan
    status: Status = Status.GATHERING
    round: int = 0
    members: frozenset[str] = frozenset()  # who holds a place
    present: frozenset[str] = frozenset()
    drawn: frozenset[str] = frozenset()  # who takes part in the open round; empty: every member
    contributed: frozenset[str] = frozenset()
    expired: bool = False  # the open round's deadline is over
    paused: bool = False  # fewer than the quorum can contribute: the round waits for more
    held: bool = False  # the operator lets no round open or close

    @property
    def missing(self) -> frozenset[str]:
        """Nodes that are present and have yet to contribute to the open round."""
        return frozenset(node for node in self.present if self.takes_part(node)) - self.contributed

    def takes_part(self, node: str) -> bool:
        """Whether a member may contribute to the open round."""
        return not self.drawn or node in self.drawn

    @property
    def stage(self) -> Stage:
        """The status as nodes are told it."""
        return _STAGES[self.status]

    def admission(self, node: str, round_: int) -> Admission:
        """Classify a member's contribution to a round at this moment."""
        if self.status is Status.FINISHED or round_ < self.round:
            return Admission.LATE
        if self.status is Status.GATHERING or round_ > self.round:
            return Admission.EARLY
        if node in self.contributed:
            return Admission.COUNTED
        if self.status is Status.UNMASKING:
            return Admission.LATE
        if self.takes_part(node):
            return Admission.DUE
        # its masks are not among the others'
        return Admission.LATE if self.plan.is_masked else Admission.NOT_DRAWN


class Joined(NamedTuple):
    """A node takes part, for the first time or again."""

    node: str


class Left(NamedTuple):
    """A node's connection ended, or it was refused."""

    node: str


class Contributed(NamedTuple):
    """A node's contribution to the open round is summed and on disk."""

    node: str


class Expired(NamedTuple):
    """The round's deadline is over."""

    round: int


class Held(NamedTuple):
    """The operator lets no round open or close from now on."""


class Released(NamedTuple):
    """The operator lets the rounds go on."""


class Dropped(NamedTuple):
    """A member is none any more."""

    node: str
    left: Federation  # what the journal holds without it


class Narrowed(NamedTuple):
    """Only these nodes take part in the open round: the masks of no others are known."""

    nodes: frozenset[str]


class Unmasked(NamedTuple):
    """No mask is left in the round's sum."""

    round: int


class Resumed(NamedTuple):
    """The coordinator is back with the state that `restore` made: what was due may be done."""


Event = (
    Joined
    | Left
    | Contributed
    | Expired
    | Held
    | Released
    | Dropped
    | Narrowed
    | Unmasked
    | Resumed
)


class Open(NamedTuple):
    """Broadcast, and let the nodes train: those that were drawn or, if none were, all."""

    round: int
    drawn: frozenset[str] = frozenset()


class Close(NamedTuple):
    """Average what came."""

    round: int
    contributors: frozenset[str]


class Finish(NamedTuple):
    """The last round is closed."""


class Pause(NamedTuple):
    """Fewer nodes are present or have contributed than the quorum:
    the round waits for more to come.
    """

    round: int


class Resume(NamedTuple):
    """Enough nodes are there again."""

    round: int


Effect = Open | Close | Finish | Pause | Resume


def sample_participants(
    nodes: Collection[str], sample: int, seed: int, round_: int
) -> frozenset[str]:
    """The participants of a round: `sample` of the `nodes`, by seed and round.

    Empty (everyone) for a sample of 0.
    """
    if not sample:
        return frozenset()
    names = sorted(nodes)
    return frozenset(
        generator(seed, "sample", round_)
        .choice(names, min(sample, len(names)), replace=False)
        .tolist()
    )


def restore(
    plan: Plan,
    round_: int,
    members: Collection[str],
    drawn: Collection[str],
    contributed: Collection[str],
) -> Federation:
    """The state that a journal holds; to be followed by the event Resumed.

    Members count as present while a round is open: they have not left, it was the coordinator who
    was away.
    """
    everyone = frozenset(members)
    if round_ == 0:
        return Federation(plan, members=everyone)
    if round_ > plan.rounds:
        return Federation(plan, Status.FINISHED, plan.rounds, everyone)
    return Federation(
        plan, Status.OPEN, round_, everyone, everyone, frozenset(drawn), frozenset(contributed)
    )


def advance(state: Federation, event: Event) -> tuple[Federation, tuple[Effect, ...]]:
    """The next state and what has to be done, in order."""
    match event:
        case Joined(node):
            state = state._replace(members=state.members | {node}, present=state.present | {node})
        case Left(node):
            state = state._replace(present=state.present - {node})
        case Contributed(node):
            if state.status is not Status.OPEN or not state.takes_part(node):
                return state, ()
            state = state._replace(contributed=state.contributed | {node})
        case Expired(round_) if round_ == state.round:
            state = state._replace(expired=True)
        case Held() | Released():
            state = state._replace(held=isinstance(event, Held))
        case Dropped(node, left):
            state = state._replace(
                plan=left.plan,
                members=left.members,
                drawn=left.drawn,
                contributed=left.contributed,
                present=state.present - {node},
            )
        case Narrowed(nodes):
            state = state._replace(drawn=nodes)
        case Unmasked(round_):
            is_due = state.status is Status.UNMASKING and round_ == state.round
            return _close(state) if is_due else (state, ())
    return _settle(state)


def _settle(state: Federation) -> tuple[Federation, tuple[Effect, ...]]:
    plan = state.plan
    if state.status is Status.FINISHED:
        return state, ()
    if state.status is Status.GATHERING:
        is_due = len(state.present) >= plan.opening and not state.held
        return _open(state) if is_due else (state, ())
    if state.status is Status.UNMASKING:
        return state, ()
    if not _may_close(state):
        return _pause_or_resume(state)
    if plan.is_masked:
        return state._replace(status=Status.UNMASKING, paused=False), ()
    return _close(state)


def _close(state: Federation) -> tuple[Federation, tuple[Effect, ...]]:
    plan = state.plan
    close = Close(state.round, state.contributed)
    if state.round == plan.rounds:
        state = state._replace(status=Status.FINISHED, round=plan.rounds, paused=False)
        return state, (close, Finish())
    state, effects = _open(state)
    return state, (close, *effects)


def _may_close(state: Federation) -> bool:
    there = frozenset(node for node in state.present if state.takes_part(node))
    return is_enough(state, state.contributed, there, len(state.drawn) or state.plan.nodes)


def is_enough(state: Federation, answered: Set[str], there: Set[str], most: int) -> bool:
    """Whether a round, or a step of it, goes on: all have `answered`,
    or a quorum and nobody is awaited any more.

    Args:
        state: of the federation.
        answered: who has done what is awaited.
        there: who is present of those who are to do it.
        most: how many these are, present or not.
    """
    if len(answered) < state.plan.quorum or state.held:
        return False
    if state.plan.is_masked and state.round in state.plan.of_all:
        return len(answered) == most  # else a class's sum might come to be of one plant or two
    return len(answered) == most or state.expired or not there - answered


def _open(state: Federation) -> tuple[Federation, tuple[Effect, ...]]:
    plan = state.plan
    round_ = state.round + 1
    sample = 0 if round_ in plan.of_all else plan.sample
    drawn = sample_participants(state.members, sample, plan.seed, round_)
    state = Federation(
        plan,
        Status.OPEN,
        round_,
        state.members,
        state.present,
        drawn,
        paused=state.paused,
    )
    state, effects = _pause_or_resume(state)
    return state, (Open(round_, drawn), *effects)


def _pause_or_resume(state: Federation) -> tuple[Federation, tuple[Effect, ...]]:
    short = len(state.missing | state.contributed) < state.plan.quorum
    if short == state.paused:
        return state, ()
    pause = Pause(state.round) if short else Resume(state.round)
    return state._replace(paused=short), (pause,)
