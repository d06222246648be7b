"""State machine of a federation's rounds: (state, event) -> (state, effects).

Pure: no MQTT, clock or files.

A round of masked contributions takes nothing more while its sum is unmasked.
"""

from collections.abc import Collection, Set

from trainer.federation.server.coordinator.effects import Close, Finish, Open, Pause, Resume
from trainer.federation.server.coordinator.events import (
    Acted,
    Contributed,
    Dropped,
    Expired,
    Joined,
    Left,
    Narrowed,
    Refused,
    RoundEvent,
    Unmasked,
)
from trainer.federation.server.coordinator.round_state import Federation, Status
from trainer.federation.server.operator_actions import Action
from trainer.seeding import generator

RoundEffect = Open | Close | Finish | Pause | Resume
Step = tuple[Federation, tuple[RoundEffect, ...]]


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


def advance(state: Federation, event: RoundEvent) -> Step:
    """The next state and what has to be done, in order."""
    match event:
        case Joined(node=node):
            state = state._replace(members=state.members | {node}, present=state.present | {node})
        case Left(node=node) | Refused(node):
            state = state._replace(present=state.present - {node})
        case Contributed(node=node):
            if state.status is not Status.OPEN or not state.takes_part(node):
                return state, ()
            state = state._replace(contributed=state.contributed | {node})
        case Expired(round_) if round_ == state.round:
            state = state._replace(expired=True)
        case Acted(Action(what="pause" | "resume" as what)):
            state = state._replace(held=what == "pause")
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


def _settle(state: Federation) -> Step:
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


def _close(state: Federation) -> Step:
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


def _open(state: Federation) -> Step:
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


def _pause_or_resume(state: Federation) -> Step:
    short = len(state.missing | state.contributed) < state.plan.quorum
    if short == state.paused:
        return state, ()
    pause = Pause(state.round) if short else Resume(state.round)
    return state._replace(paused=short), (pause,)
