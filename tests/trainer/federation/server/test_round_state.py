"""The round's state machine, without broker, clock or files."""

import random
from collections.abc import Iterable

import pytest

from trainer.federation.server.round_state import (
    Admission,
    Close,
    Contributed,
    Dropped,
    Effect,
    Event,
    Expired,
    Federation,
    Finish,
    Held,
    Joined,
    Left,
    Open,
    Pause,
    Plan,
    Released,
    Resume,
    Resumed,
    Status,
    advance,
    restore,
    sample_participants,
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
        pytest.param(
            Plan(2, 2, 1),
            [*join("a"), Left("a"), *join("b")],
            [],
            id="who left before the start is missing",
        ),
        pytest.param(
            Plan(2, 2, 1),
            [*join("a", "b"), *contribute("a", "b")],
            [Open(1), Close(1, AB), Finish()],
            id="one round",
        ),
        pytest.param(
            Plan(2, 2, 2),
            [*join("a", "b"), *contribute("b", "a")],
            [Open(1), Close(1, AB), Open(2)],
            id="next round",
        ),
        pytest.param(
            Plan(2, 2, 1),
            [*join("a", "b"), *contribute("a", "a")],
            [Open(1)],
            id="contributions count once",
        ),
        pytest.param(
            Plan(2, 2, 1),
            [*join("a", "b"), Left("b")],
            [Open(1), Pause(1)],
            id="fewer than the quorum: says that it waits",
        ),
        pytest.param(
            Plan(2, 2, 1),
            [*join("a", "b"), Left("b"), *contribute("a"), *join("b"), *contribute("b")],
            [Open(1), Pause(1), Resume(1), Close(1, AB), Finish()],
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
            Plan(2, 1, 1),
            [*join("a", "b"), *contribute("a")],
            [Open(1)],
            id="but waits for those who are there",
        ),
        pytest.param(
            Plan(1, 1, 1), contribute("a"), [], id="nothing to contribute to before the start"
        ),
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
    assert advance(state, Joined("late"))[1] == ()


ABC = frozenset("abc")


@pytest.mark.parametrize(
    ("plan", "events", "effects"),
    [
        pytest.param(
            Plan(3, 2, 1),
            [*join("a", "b", "c"), *contribute("a", "b"), Expired(1)],
            [Open(1), Close(1, AB), Finish()],
            id="with a quorum the deadline closes it without the slow ones",
        ),
        pytest.param(
            Plan(3, 2, 1),
            [*join("a", "b", "c"), *contribute("a"), Expired(1)],
            [Open(1)],
            id="without a quorum the deadline closes nothing",
        ),
        pytest.param(
            Plan(3, 2, 1),
            [*join("a", "b", "c"), *contribute("a"), Expired(1), *contribute("b")],
            [Open(1), Close(1, AB), Finish()],
            id="after the deadline the quorum's last contribution closes it",
        ),
        pytest.param(
            Plan(3, 2, 2),
            [*join("a", "b", "c"), *contribute("a", "b", "c"), Expired(1), *contribute("a", "b")],
            [Open(1), Close(1, ABC), Open(2)],
            id="a deadline of an earlier round means nothing",
        ),
        pytest.param(
            Plan(3, 2, 1),
            [*join("a", "b", "c"), *contribute("a", "b")],
            [Open(1)],
            id="with a quorum it waits for who is there",
        ),
        pytest.param(
            Plan(3, 2, 1),
            [*join("a", "b", "c"), Left("c"), *contribute("a", "b")],
            [Open(1), Close(1, AB), Finish()],
            id="with a quorum it waits for nobody who is away",
        ),
        pytest.param(Plan(3, 2, 1), join("a"), [], id="waits for its quorum"),
        pytest.param(Plan(3, 2, 1), join("a", "b"), [Open(1)], id="opens when its quorum is there"),
        pytest.param(
            Plan(3, 2, 1, sample=2), join("a", "b"), [], id="all are there from whom some are drawn"
        ),
        pytest.param(
            Plan(3, 2, 2),
            [*join("a", "b"), *contribute("a"), *join("c"), *contribute("b", "c")],
            [Open(1), Close(1, ABC), Open(2)],
            id="who joins late takes part in the open round",
        ),
        pytest.param(
            Plan(3, 3, 2),
            [*join("a", "b", "c"), Left("a"), Left("b"), *join("b", "a")],
            [Open(1), Pause(1), Resume(1)],
            id="pauses once, and resumes when enough are back",
        ),
        pytest.param(
            Plan(3, 3, 2),
            [*join("a", "b", "c"), *contribute("a", "b"), Left("a"), *contribute("c")],
            [Open(1), Close(1, ABC), Open(2), Pause(2)],
            id="the next round pauses at once if the quorum is away",
        ),
    ],
)
def test_rounds_open_and_close_by_quorum_and_deadline(
    plan: Plan, events: list[Event], effects: list[Effect]
) -> None:
    assert play(plan, events)[1] == effects


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
            state, new = advance(state, Contributed(node))
            effects += new
    assert [effect.contributors for effect in effects if isinstance(effect, Close)] == [
        effect.drawn for effect in effects if isinstance(effect, Open)
    ]
    assert len({effect.drawn for effect in effects if isinstance(effect, Open)}) > 5


def test_all_nodes_take_part_in_a_round_that_is_for_statistics() -> None:
    plan, start = Plan(3, 1, 2, sample=1, of_all=frozenset({2})), join("a", "b", "c")
    (drawn,) = play(plan, start)[0].drawn
    state, effects = play(plan, [*start, Contributed(drawn), *contribute("a", "b")])
    assert (state.missing, effects[-1]) == (frozenset("c"), Open(2))
    assert advance(state, Contributed("c"))[1] == (Close(2, frozenset("abc")), Finish())


def test_a_restored_round_waits_for_its_members_until_they_leave() -> None:
    plan = Plan(3, 2, 2)
    state = restore(plan, 1, "abc", (), "ab")
    state, effects = advance(state, Resumed())
    assert (state.missing, effects) == (frozenset("c"), ())
    assert advance(state, Left("c"))[1] == (Close(1, AB), Open(2))


def test_a_restored_round_that_was_about_to_close_closes() -> None:
    assert advance(restore(Plan(2, 2, 2), 1, "ab", (), "ab"), Resumed())[1] == (
        Close(1, AB),
        Open(2),
    )
    assert advance(restore(Plan(2, 2, 2), 2, "ab", (), "ab"), Resumed())[1] == (
        Close(2, AB),
        Finish(),
    )


def test_restored_before_the_start_or_after_the_end_nothing_is_due() -> None:
    for round_, status in ((0, Status.GATHERING), (3, Status.FINISHED)):
        state, effects = advance(restore(Plan(2, 2, 2), round_, "ab", (), ()), Resumed())
        assert (state.status, effects) == (status, ())


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
    assert state.admission(node, round_) is admission


def test_while_the_operator_holds_it_no_round_opens_or_closes_and_nothing_is_lost() -> None:
    plan = Plan(2, 2, 1)
    state, effects = play(plan, [Held(), *join("a", "b")])
    assert (effects, state.status) == ([], Status.GATHERING)
    state, effects = play(plan, [*join("a", "b"), Held(), *contribute("a", "b"), Expired(1)])
    assert effects == [Open(1)]
    assert advance(state, Released())[1] == (Close(1, AB), Finish())


def test_a_round_closes_without_a_node_that_is_dropped_and_its_contribution() -> None:
    state, _ = play(Plan(3, 3, 1), [*join("a", "b", "c"), *contribute("a", "c")])
    left = restore(Plan(2, 2, 1), 1, "ab", (), "a")
    state, effects = advance(state, Dropped("c", left))
    assert (effects, state.members, state.contributed) == ((), AB, frozenset("a"))
    assert advance(state, Contributed("b"))[1] == (Close(1, AB), Finish())


def test_a_round_for_which_only_a_dropped_node_was_awaited_closes_at_once() -> None:
    state, _ = play(Plan(3, 3, 1), [*join("a", "b", "c"), *contribute("a", "b")])
    _, effects = advance(state, Dropped("c", restore(Plan(2, 2, 1), 1, "ab", (), "ab")))
    assert effects == (Close(1, AB), Finish())


def test_what_comes_while_a_sum_is_unmasked_is_late_although_its_nodes_see_the_round_open() -> None:
    plan = Plan(2, 1, 3, is_masked=True)
    state, _ = play(plan, [*join("a", "b"), *contribute("a"), Expired(1)])
    assert (state.status, state.stage) == (Status.UNMASKING, "open")
    assert [state.admission(node, 1) for node in "ab"] == [Admission.COUNTED, Admission.LATE]
    assert state.admission("b", 2) is Admission.EARLY
