"""The masks of a round, coordinator and nodes together:
what is read is the open sum of survivors, or nothing.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_config.protocol.errors import PeerError
from broker_config.protocol.messages import MaskingAnswer
from broker_config.security.mask_keys import own_seed
from tests.support.masked_round import SCOPE, MaskedRound, sum_of
from tests.support.wire_messages import KEYS, RUN, SESSION
from trainer.federation.server.coordinator import masking_machine
from trainer.federation.server.coordinator.effects import Forgotten, Refuse
from trainer.federation.server.unmasking import masks_in_sum


def as_bytes(round_: MaskedRound) -> dict[str, bytes]:
    assert round_.found is not None
    return {name: words.tobytes() for name, words in round_.found.items()}


@pytest.mark.parametrize(
    ("nodes", "neighbours"), [(3, 0), (4, 0), (10, 0), (10, 4), (10, 8), (10, 9), (20, 6)]
)
def test_all_that_contribute_are_in_the_sum_bit_for_bit(nodes: int, neighbours: int) -> None:
    round_ = MaskedRound(nodes, neighbours=neighbours)
    assert round_.run() is not None
    assert as_bytes(round_) == sum_of(round_, round_.names)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(3, 0), (4, 0), (5, 0), (7, 0), (8, 6), (9, 4)]),
    st.integers(0, 2**32),
    st.data(),
)
def test_whoever_is_lost_or_killed_at_whichever_step_the_sum_is_that_of_survivors(
    size: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    """A third of the nodes goes for good; the others and the coordinator are killed and come back.

    Few neighbours may be all among the lost: then it is said of whom.
    """
    nodes, neighbours = size
    chance = random.Random(seed)
    round_ = MaskedRound(nodes, quorum=-(-2 * nodes // 3), chance=chance, neighbours=neighbours)
    lost = chance.sample(round_.names, nodes - round_.threshold)
    events = data.draw(
        st.lists(st.sampled_from([*lost, "coordinator", *round_.names]), max_size=12)
    )
    for event in events:
        for _ in range(chance.randrange(4 * nodes)):
            if way := round_._choose():
                round_.deliver(*way)
        if event == "coordinator":
            round_.restart_coordinator()
        elif event in lost:
            round_.lose(event)
        else:
            round_.restart_node(event)
    for name in lost:
        round_.lose(name)
    if round_.run() is None:
        assert round_.unreadable
        assert neighbours
        return
    assert len(round_.masking.survivors) >= round_.threshold
    assert as_bytes(round_) == sum_of(round_, round_.masking.survivors)


def test_a_sum_is_not_unmasked_when_too_few_are_left_who_hold_a_node_s_shares() -> None:
    round_ = MaskedRound(12, quorum=8, neighbours=4)
    while not round_.masking.is_shared:
        round_.deliver(*(round_._choose() or ("", "")))
    lonely = round_.names[0]
    lost = [*round_.masking.shares[lonely]]
    for name in lost:
        round_.lose(name)
    assert round_.run() is None
    assert lonely in round_.unreadable
    assert round_.masking.survivors == ()
    assert not any(record and record.survivors for record in round_.records.values())


@pytest.mark.parametrize("after", range(0, 60, 6))
def test_when_fewer_than_the_threshold_are_left_nothing_is_read(after: int) -> None:
    round_ = MaskedRound(6, quorum=4, chance=random.Random(after))
    for _ in range(after):
        if way := round_._choose():
            round_.deliver(*way)
    for name in round_.names[:3]:
        round_.lose(name)
        for way, under_way in round_.ways.items():
            if name in way:
                under_way.clear()
    if round_.found is None:
        assert round_.run() is None or len(round_.masking.revealed) >= round_.threshold


def test_without_a_quorum_a_round_waits_for_all_of_its_nodes() -> None:
    round_ = MaskedRound(4)
    round_.gone.add("plant-3")  # it is there, and says nothing
    round_.ways["plant-3", "coordinator"].clear()
    assert round_.run() is None
    assert not round_.masking.is_gathered
    round_.gone.clear()
    round_.begin("plant-3")
    assert round_.run() is not None


def test_a_node_whose_keys_come_too_late_is_not_in_the_round() -> None:
    round_ = MaskedRound(4, quorum=3)
    late = round_.ways["plant-3", "coordinator"].popleft()
    round_.lose("plant-3")
    assert round_.run() is not None
    assert round_.masking.survivors == round_.names[:3]
    assert isinstance(late, MaskingAnswer)
    assert masking_machine.hear(round_.masking, "plant-3", late) == (round_.masking, [])


def test_a_liar_s_shares_are_left_out_where_there_is_one_more() -> None:
    round_ = MaskedRound(4)
    liar = round_.names[1]

    while way := round_._choose():
        message = round_.ways[way][0]
        if way[0] == liar and isinstance(message, MaskingAnswer) and message.revealed:
            round_.ways[way][0] = MaskingAnswer(
                session=SESSION,
                run=RUN,
                round=1,
                revealed=dict.fromkeys(message.revealed, "00" * 33),
            )
        round_.deliver(*way)
    assert as_bytes(round_) == sum_of(round_, round_.names)


def test_what_an_earlier_attempt_has_found_is_not_sought_again() -> None:
    """Of many nodes that takes seconds, and each one that reveals shares is an attempt."""
    round_ = MaskedRound(4)
    round_.run()
    assert round_.secrets.keys() == {*round_.names}
    known = dict.fromkeys(round_.names, bytes(32))
    masks = masks_in_sum(round_.masking, SCOPE, known)
    assert masks == [(own_seed(SCOPE, bytes(32), name), -1) for name in round_.names]


def test_shares_that_are_not_for_the_round_s_nodes_are_refused() -> None:
    round_ = MaskedRound(3)
    while not round_.masking.is_gathered:
        round_.deliver(*(round_._choose() or ("", "")))
    for neighbours, receivers in (
        (0, "plant-1 plant-9"),
        (0, "plant-1"),
        (1, "plant-1 plant-2"),
        (1, "plant-0"),
    ):
        state = round_.masking._replace(neighbours=neighbours)
        false = MaskingAnswer(
            session=SESSION, run=RUN, round=1, shares=dict.fromkeys(receivers.split(), "00" * 82)
        )
        _, (effect,) = masking_machine.hear(state, "plant-0", false)
        assert isinstance(effect, Refuse)
        assert isinstance(effect.error, PeerError)


def test_who_reveals_shares_that_it_was_not_given_is_refused() -> None:
    round_ = MaskedRound(8, neighbours=4)
    while not round_.masking.agreed:
        round_.deliver(*(round_._choose() or ("", "")))
    node = round_.names[0]
    given = {node, *(name for name, shares in round_.masking.shares.items() if node in shares)}
    stranger = next(name for name in round_.names if name not in given)
    for names, accepted in ((given, True), ({*given, stranger}, False)):
        said = MaskingAnswer(
            session=SESSION, run=RUN, round=1, revealed=dict.fromkeys(names, "00" * 33)
        )
        _, effects = masking_machine.hear(round_.masking, node, said)
        assert [type(each) for each in effects] == ([] if accepted else [Refuse])


def test_what_is_said_of_another_round_or_out_of_turn_has_no_effect() -> None:
    round_ = MaskedRound(3)
    for said in (
        MaskingAnswer(session=SESSION, run=RUN, round=2, keys=KEYS),
        MaskingAnswer(session=SESSION, run=RUN, round=1, shares={"plant-1": "00" * 82}),
        MaskingAnswer(session=SESSION, run=RUN, round=1, signature="00" * 64),
        MaskingAnswer(session=SESSION, run=RUN, round=1, revealed={"plant-1": "00" * 33}),
    ):
        assert masking_machine.hear(round_.masking, "plant-0", said) == (round_.masking, [])


# Statistics

HELD = {"plant-0": (0, 1), "plant-1": (0, 1), "plant-2": (1, 0), "plant-3": (0,)}


def test_statistics_are_summed_where_three_nodes_have_each_class_that_any_has() -> None:
    round_ = MaskedRound(4, classes=HELD)
    assert round_.run() is not None
    assert as_bytes(round_) == sum_of(round_, round_.names)
    assert round_.scarce == []


@pytest.mark.parametrize("holders", [1, 2])
def test_a_class_that_fewer_have_is_not_summed_and_nobody_is_told_shares(holders: int) -> None:
    classes = {
        name: (*held, 5) if number < holders else held
        for number, (name, held) in enumerate(HELD.items())
    }
    round_ = MaskedRound(4, classes=classes)
    assert round_.run() is None
    assert round_.scarce == [5]
    assert round_.arrived == {}


def test_a_round_of_statistics_waits_for_all_whatever_the_quorum() -> None:
    """Of a class that three have one could be lost."""
    round_ = MaskedRound(4, quorum=3, classes=HELD)
    while not round_.masking.is_shared:
        way = round_._choose()
        assert way
        round_.deliver(*way)
    round_.lose("plant-0")
    assert round_.run() is None
    assert round_.masking.survivors == ()
    round_.gone.clear()
    round_.restart_node("plant-0")
    assert round_.run() is not None
    assert as_bytes(round_) == sum_of(round_, round_.names)


def test_a_node_that_comes_back_without_its_secrets_is_told_nothing_and_people_are_told() -> None:
    round_ = MaskedRound(3)
    while not round_.masking.is_gathered:
        way = round_._choose()
        assert way
        round_.deliver(*way)
    again = MaskingAnswer(session=SESSION, run=RUN, round=1, keys=KEYS)
    assert masking_machine.hear(round_.masking, "plant-1", again) == (
        round_.masking,
        [Forgotten("plant-1")],
    )


def test_a_round_of_statistics_waits_for_nobody_who_has_never_come() -> None:
    round_ = MaskedRound(5, quorum=4, classes={**HELD, "plant-4": (0,)})
    round_.federation = round_.federation._replace(members=frozenset(round_.names[:4]))
    round_.lose("plant-4")
    round_.ways["plant-4", "coordinator"].clear()
    assert round_.run() is not None
    assert as_bytes(round_) == sum_of(round_, round_.names[:4])
