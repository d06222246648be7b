"""The round's state machine, without broker, clock or files."""

from collections.abc import Iterable

import pytest

from tests.support.round_events import contributed, joined
from trainer.federation.server.coordinator.admission import Admission, classify
from trainer.federation.server.coordinator.effects import Close, Effect, Finish, Open
from trainer.federation.server.coordinator.events import (
    Dropped,
    Event,
    Expired,
)
from trainer.federation.server.coordinator.round_machine import advance, sample_participants
from trainer.federation.server.coordinator.round_state import (
    Federation,
    Plan,
    Status,
    restore,
)


def play(plan: Plan, events: Iterable[Event]) -> tuple[Federation, list[Effect]]:
    state, effects = Federation(plan), []
    for event in events:
        state, new = advance(state, event)
        effects += new
    return state, effects


def join(*nodes: str) -> list[Event]:
    return [joined(node) for node in nodes]


def contribute(*nodes: str) -> list[Event]:
    return [contributed(node) for node in nodes]


AB = frozenset("ab")


@pytest.mark.parametrize("seed", range(3))
def test_each_round_draws_its_sample_by_seed_and_round_and_waits_for_nobody_else(seed: int) -> None:
    nodes = ["a", "b", "c", "d", "e"]
    plan = Plan(5, 2, 20, sample=2, seed=seed)
    state, effects = play(plan, join(*nodes))
    for _ in range(20):
        drawn, others = state.drawn, set(nodes) - state.drawn
        assert len(drawn) == 2
        assert drawn == sample_participants(reversed(nodes), 2, seed, state.round)
        for node in [*others, *drawn]:
            state, new = advance(state, contributed(node))
            effects += new
    assert [effect.contributors for effect in effects if isinstance(effect, Close)] == [
        effect.drawn for effect in effects if isinstance(effect, Open)
    ]
    assert len({effect.drawn for effect in effects if isinstance(effect, Open)}) > 5


@pytest.mark.parametrize(
    ("status", "node", "round_", "admission"),
    [
        (Status.GATHERING, "a", 1, Admission.EARLY),
        (Status.OPEN, "a", 3, Admission.DUE),
        (Status.OPEN, "b", 3, Admission.COUNTED),
        (Status.OPEN, "c", 3, Admission.NOT_DRAWN),
        (Status.OPEN, "a", 2, Admission.LATE),
        (Status.OPEN, "b", 2, Admission.LATE),
        (Status.OPEN, "a", 4, Admission.EARLY),
        (Status.FINISHED, "a", 3, Admission.LATE),
    ],
)
def test_a_contribution_is_summed_only_in_its_own_open_round(
    status: Status, node: str, round_: int, admission: Admission
) -> None:
    round_now = 0 if status is Status.GATHERING else 3
    state = Federation(
        Plan(3, 2, 3),
        status,
        round_now,
        frozenset("abc"),
        frozenset("abc"),
        frozenset("ab"),
        frozenset("b"),
    )
    assert classify(state, node, round_) is admission


def test_a_round_closes_without_a_node_that_is_dropped_and_its_contribution() -> None:
    state, _ = play(Plan(3, 3, 1), [*join("a", "b", "c"), *contribute("a", "c")])
    left = restore(Plan(2, 2, 1), 1, "ab", (), "a")
    state, effects = advance(state, Dropped("c", left))
    assert (effects, state.members, state.contributed) == ((), AB, frozenset("a"))
    assert advance(state, contributed("b"))[1] == (Close(1, AB), Finish())


def test_a_round_for_which_only_a_dropped_node_was_awaited_closes_at_once() -> None:
    state, _ = play(Plan(3, 3, 1), [*join("a", "b", "c"), *contribute("a", "b")])
    _, effects = advance(state, Dropped("c", restore(Plan(2, 2, 1), 1, "ab", (), "ab")))
    assert effects == (Close(1, AB), Finish())


def test_what_comes_while_a_sum_is_unmasked_is_late_although_its_nodes_see_the_round_open() -> None:
    plan = Plan(2, 1, 3, is_masked=True)
    state, _ = play(plan, [*join("a", "b"), *contribute("a"), Expired(1)])
    assert (state.status, state.stage) == (Status.UNMASKING, "open")
    assert [classify(state, node, 1) for node in "ab"] == [Admission.COUNTED, Admission.LATE]
    assert classify(state, "b", 2) is Admission.EARLY
