"""The round's state machine, without broker, clock or files."""

import random
from collections.abc import Iterable

import pytest

from trainer.federation.round import (
    Close,
    Contributed,
    Effect,
    Event,
    Federation,
    Finish,
    Joined,
    Left,
    Open,
    Pause,
    Plan,
    Status,
    advance,
)


def play(plan: Plan, events: Iterable[Event]) -> tuple[Federation, list[Effect]]:
    state, effects = Federation(plan), []
    for event in events:
        state, new = advance(state, event)
        effects += new
    return state, effects


def join(*nodes: str) -> list[Event]:
    return [Joined(node) for node in nodes]


def contribute(*nodes: str) -> list[Event]:
    return [Contributed(node) for node in nodes]


AB = frozenset("ab")


@pytest.mark.parametrize(
    ("plan", "events", "effects"),
    [
        pytest.param(Plan(2, 2, 1), join("a"), [], id="waits for all nodes"),
        pytest.param(Plan(2, 2, 1), join("a", "a"), [], id="a node that joins twice is one node"),
        pytest.param(Plan(2, 2, 1), join("a", "b"), [Open(1)], id="opens when all are there"),
        pytest.param(Plan(2, 2, 1), [*join("a"), Left("a"), *join("b")], [], id="who left before the start is missing"),
        pytest.param(
            Plan(2, 2, 1), [*join("a", "b"), *contribute("a", "b")], [Open(1), Close(1, AB), Finish()], id="one round"
        ),
        pytest.param(
            Plan(2, 2, 2), [*join("a", "b"), *contribute("b", "a")], [Open(1), Close(1, AB), Open(2)], id="next round"
        ),
        pytest.param(Plan(2, 2, 1), [*join("a", "b"), *contribute("a", "a")], [Open(1)], id="contributions count once"),
        pytest.param(
            Plan(2, 2, 1),
            [*join("a", "b"), Left("b")],
            [Open(1), Pause(1)],
            id="fewer than the quorum: says that it waits",
        ),
        pytest.param(
            Plan(2, 2, 1),
            [*join("a", "b"), Left("b"), *contribute("a"), *join("b"), *contribute("b")],
            [Open(1), Pause(1), Close(1, AB), Finish()],
            id="goes on when the lost node is back",
        ),
        pytest.param(
            Plan(2, 2, 1),
            [*join("a", "b"), *contribute("b"), Left("b"), *contribute("a")],
            [Open(1), Close(1, AB), Finish()],
            id="a contribution stays when its node leaves",
        ),
        pytest.param(
            Plan(2, 1, 1),
            [*join("a", "b"), *contribute("a"), Left("b")],
            [Open(1), Close(1, frozenset("a")), Finish()],
            id="with a smaller quorum the round goes on without the lost node",
        ),
        pytest.param(
            Plan(2, 1, 1), [*join("a", "b"), *contribute("a")], [Open(1)], id="but waits for those who are there"
        ),
        pytest.param(Plan(1, 1, 1), contribute("a"), [], id="nothing to contribute to before the start"),
    ],
)
def test_events_have_these_effects(plan: Plan, events: list[Event], effects: list[Effect]) -> None:
    assert play(plan, events)[1] == effects


@pytest.mark.parametrize("seed", range(5))
def test_in_any_order_of_contributions_each_round_opens_and_closes_once(seed: int) -> None:
    order = random.Random(seed)
    nodes = ["a", "b", "c", "d"]
    state, effects = play(Plan(4, 4, 6), join(*nodes))
    while state.status is not Status.FINISHED:
        for node in order.sample(nodes * 2, 8):  # duplicates included
            if state.status is Status.OPEN and node in state.missing:
                state, new = advance(state, Contributed(node))
                effects += new
    assert [effect.round for effect in effects if isinstance(effect, Open)] == [1, 2, 3, 4, 5, 6]
    assert [effect.round for effect in effects if isinstance(effect, Close)] == [1, 2, 3, 4, 5, 6]
    assert effects[-1] == Finish()
    assert advance(state, Joined("late")) == (state, ())
