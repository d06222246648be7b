"""What a node says of its masks, and what no coordinator can make it say."""

import msgspec
import pytest

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import MaskingStep
from broker_config.security import mask_keys
from broker_config.security.mask_keys import RoundSecrets
from broker_config.security.secret_sharing import Interpolation
from tests.support.masked_round import SCOPE, MaskedRound
from tests.support.wire_messages import RUN
from trainer.federation.masking import member_state
from trainer.federation.masking.member_state import Record

NODE = "plant-0"


def step(**what: object) -> MaskingStep:
    return MaskingStep(run=RUN, round=1, **what)  # type: ignore[arg-type]


def until(round_: MaskedRound, done: str) -> None:
    """Let a round go on until the coordinator has reached a step."""
    while not getattr(round_.masking, done):
        way = round_._choose()
        assert way
        round_.deliver(*way)


def reach(done: str, nodes: int = 6) -> tuple[MaskedRound, Record]:
    """A round in which our node knows of this step, and has answered it."""
    round_ = MaskedRound(nodes)
    until(round_, done)
    while round_.ways["coordinator", NODE]:
        round_.deliver("coordinator", NODE)
    record = round_.records[NODE]
    assert record is not None
    return round_, record


def refuses(round_: MaskedRound, record: Record, said: MaskingStep, why: str) -> None:
    with pytest.raises(EdgeNodeError, match=why):
        member_state.advance(round_.members[NODE], record, said)


# Cohorts


def test_a_second_cohort_of_one_round_is_refused() -> None:
    """Its shares and masks would be others, of the same contribution."""
    round_, record = reach("is_gathered")
    other, _ = reach("is_gathered")
    members = {**record.cohort, "plant-5": other.masking.keys["plant-5"]}
    refuses(round_, record, step(members=members), "names another cohort for it than before")
    refuses(
        round_, record, step(members=dict([*record.cohort.items()][:5])), "names another cohort"
    )


def test_the_first_cohort_said_again_is_answered_again() -> None:
    round_, record = reach("is_gathered")
    again = member_state.advance(round_.members[NODE], record, step(members=record.cohort))
    assert again[0] == record
    assert again[1][0].shares.keys() == record.cohort.keys() - {NODE}
    assert again == member_state.advance(round_.members[NODE], record, step(members=record.cohort))


def test_keys_that_their_node_has_not_signed_are_refused() -> None:
    """Else a coordinator would be each node's only partner, and could take all masks away."""
    round_ = MaskedRound(6)
    until(round_, "is_gathered")
    record, cohort = round_.records[NODE], dict(round_.masking.keys)
    assert record is not None
    own = RoundSecrets(mask_keys.draw_root(), SCOPE, "plant-1").public()
    for forged in (
        msgspec.structs.replace(own, signature=cohort["plant-1"].signature),
        msgspec.structs.replace(own, signature=""),
        msgspec.structs.replace(cohort["plant-1"], signature=cohort["plant-2"].signature),
    ):
        refuses(
            round_,
            record,
            step(members={**cohort, "plant-1": forged}),
            "keys of plant-1 that are not plant-1's",
        )
    strangers = {name: keys for name, keys in cohort.items() if name != "plant-5"} | {
        "plant-9": cohort["plant-1"]
    }
    refuses(
        round_,
        record,
        step(members=strangers),
        r"keys of plant-9 that are not plant-9's \(no member\)",
    )


def test_points_that_are_no_keys_are_refused_though_their_node_has_signed_them() -> None:
    """A liar among the nodes could else have the others fail, or know what they share."""
    round_ = MaskedRound(6)
    until(round_, "is_gathered")
    record, cohort = round_.records[NODE], dict(round_.masking.keys)
    assert record is not None
    false = msgspec.structs.replace(cohort["plant-1"], cipher="00" * 32)
    signature = round_.members["plant-1"].sign(
        mask_keys.KEYS, mask_keys.keys_statement(SCOPE, "plant-1", false)
    )
    false = msgspec.structs.replace(false, signature=signature)
    refuses(round_, record, step(members={**cohort, "plant-1": false}), "nobody can have that key")


def test_keys_of_another_round_are_refused() -> None:
    round_ = MaskedRound(6)
    until(round_, "is_gathered")
    record = Record(run=RUN, round=2, root=mask_keys.draw_root().hex())
    keys = member_state.public_keys(round_.members[NODE], record)
    said = MaskingStep(run=RUN, round=2, members={**round_.masking.keys, NODE: keys})
    refuses(round_, record, said, r"keys of plant-\d that are not plant-\d's")


def test_a_cohort_below_the_threshold_or_with_other_keys_of_ours_is_refused() -> None:
    round_ = MaskedRound(6)
    until(round_, "is_gathered")
    record, cohort = round_.records[NODE], dict(round_.masking.keys)
    assert record is not None
    refuses(
        round_,
        record,
        step(members=dict([*cohort.items()][:3])),
        "a cohort of 3, below the threshold of 4",
    )
    refuses(
        round_, record, step(members={**cohort, NODE: cohort["plant-1"]}), "other keys of this node"
    )


def test_a_cohort_of_more_nodes_than_the_federation_has_is_refused() -> None:
    """Two lists of survivors could then have the threshold of signatures, and no node in common."""
    round_ = MaskedRound(6)
    until(round_, "is_gathered")
    record, said = round_.records[NODE], step(members=dict(round_.masking.keys))
    assert record is not None
    with pytest.raises(EdgeNodeError, match=r"cohort of 6.*5 nodes"):
        member_state.advance(round_.members[NODE]._replace(nodes=5), record, said)
    assert member_state.advance(round_.members[NODE], record, said)[0].cohort


def test_a_cohort_without_this_node_and_steps_of_another_round_have_no_effect() -> None:
    round_, record = reach("is_shared")
    others = {name: keys for name, keys in record.cohort.items() if name != NODE}
    for said in (
        step(members=others),
        MaskingStep(run=RUN, round=2, survivors=round_.names),
        MaskingStep(run="f" * 16, round=1, survivors=round_.names),
    ):
        assert member_state.advance(round_.members[NODE], record, said) == (record, [])


# Shares


def test_masks_count_of_cohort_members_alone_and_of_no_fewer_than_the_threshold() -> None:
    round_, record = reach("is_gathered")
    for counted, why in (
        ((*round_.names, "plant-9"), "nodes that are none of its cohort"),
        (round_.names[1:], "or not those of this one"),
        ((*round_.names, NODE), "nodes that are none of its cohort"),
        (round_.names[:3], "lets masks of 3 nodes count; 4 of its cohort"),
    ):
        refuses(round_, record, step(counted=counted), why)
    shares = dict.fromkeys(round_.names[4:], "00" * 82)
    refuses(
        round_,
        record,
        step(counted=round_.names[:5], shares=shares),
        "passes on shares of nodes whose masks do",
    )
    refuses(
        round_, record, step(counted=round_.names, shares={NODE: "00" * 82}), "passes on shares"
    )
    assert not record.can_mask


def test_whose_masks_count_does_not_change() -> None:
    round_, record = reach("is_shared")
    fewer = {name: record.shares[name] for name in round_.names[1:5]}
    for counted, shares in (
        (round_.names[:5], fewer),
        (round_.names, fewer),
        (round_.names[:5], record.shares),
    ):
        refuses(
            round_,
            record,
            step(counted=counted, shares=shares),
            "names other nodes whose masks count than before",
        )
    again = step(counted=record.counted, shares=record.shares)
    assert member_state.advance(round_.members[NODE], record, again) == (record, [])


# Neighbours


def test_a_node_shares_with_neighbours_that_nobody_can_guess_and_always_with_the_same() -> None:
    """Else its coordinator could see to it that friends of its own hold the shares."""
    round_ = MaskedRound(12, neighbours=4)
    until(round_, "is_gathered")
    cohort, chosen = step(members=dict(round_.masking.keys)), set[frozenset[str]]()
    for name in round_.names:
        record = round_.records[name]
        assert record is not None
        once, again = (
            member_state.advance(round_.members[name], record, cohort)[1][0].shares
            for _ in range(2)
        )
        assert once.keys() == again.keys() <= {*round_.names} - {name}
        assert len(once) == 4
        chosen.add(frozenset(once))
    assert len(chosen) > 6


def test_of_a_node_s_secrets_its_neighbours_shares_are_enough_and_those_of_half_of_them() -> None:
    round_ = MaskedRound(12, neighbours=4)
    until(round_, "is_gathered")
    record = round_.records[NODE]
    assert record is not None
    own = RoundSecrets(bytes.fromhex(record.root), SCOPE, NODE)
    cohort = dict(round_.masking.keys)
    places = mask_keys.points(round_.names)
    record, _ = member_state.advance(round_.members[NODE], record, step(members=cohort))
    shares = member_state._shares_for(round_.members[NODE], record, round_.names)
    for names in (round_.names[:2], round_.names[5:7]):
        dealt = {places[name]: mask_keys.split_pair(shares[name])[0] for name in names}
        assert Interpolation(list(dealt)).combine(dealt) == own.agreement


def test_masks_are_shared_with_who_was_chosen_and_with_who_has_chosen() -> None:
    """Both ends of a pair know of it, or what they add would stay in the sum."""
    round_ = MaskedRound(12, neighbours=4)
    until(round_, "is_shared")
    while round_.masking.survivors == ():
        way = round_._choose()
        assert way
        round_.deliver(*way)
    seeds = dict[bytes, list[int]]()
    counts = []
    for name, record in round_.records.items():
        assert record is not None
        pairs = member_state.mask_seeds(round_.members[name], record)[1:]
        counts.append(len(pairs))
        for seed, sign in pairs:
            seeds.setdefault(seed, []).append(sign)
    assert min(counts) >= 4
    assert sum(counts) < 11 * 12  # who chooses four cannot have been chosen by all
    assert {tuple(sorted(signs)) for signs in seeds.values()} == {(-1, 1)}


def test_survivors_among_whom_a_node_has_too_few_neighbours_are_refused() -> None:
    """Its coordinator could cut it off, and would read what it has sent by itself."""
    round_ = MaskedRound(12, neighbours=6)
    until(round_, "is_shared")
    while round_.ways["coordinator", NODE]:
        round_.deliver("coordinator", NODE)
    record = round_.records[NODE]
    assert record is not None
    own = RoundSecrets(bytes.fromhex(record.root), SCOPE, NODE)
    chosen = own.neighbours(record.cohort, 6)
    others = [name for name in round_.names if name not in chosen]
    few = tuple(sorted([*others, *chosen[:2]]))
    refuses(round_, record, step(survivors=few), "among whom too few share secrets of this node")
    enough = tuple(sorted([*others, *chosen[:3]]))
    _, (answer,) = member_state.advance(round_.members[NODE], record, step(survivors=enough))
    assert answer.signature


# Survivors


@pytest.mark.parametrize("second", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 5)])
def test_a_coordinator_that_lies_about_who_has_dropped_out_is_found_out(
    second: tuple[int, ...],
) -> None:
    """With two lists of one round it could take one sum from the other,
    and would have what single nodes have sent.
    """
    round_, record = reach("survivors")
    assert record.survivors == round_.names
    refuses(
        round_,
        record,
        step(survivors=tuple(round_.names[each] for each in second)),
        "has named other survivors of it",
    )


def test_survivors_below_the_threshold_or_of_no_such_round_are_refused() -> None:
    round_, record = reach("is_shared")
    for survivors, why in (
        (round_.names[:3], "names 3 survivors, below the threshold of 4"),
        (round_.names[1:], "or not this one"),
        ((*round_.names, "plant-9"), "none of its nodes"),
        ((NODE, NODE, *round_.names[1:3]), "none of its nodes"),
    ):
        refuses(round_, record, step(survivors=survivors), why)


def test_nothing_is_revealed_before_enough_have_signed_the_same_survivors() -> None:
    """A coordinator that tells each node another list has too few signatures under any of them."""
    round_, record = reach("agreed")
    signatures = dict(round_.masking.agreed)
    few = dict([*signatures.items()][:3])
    refuses(round_, record, step(signatures=few), "fewer than 4 survivors' signatures")
    statement = mask_keys.survivors_statement(SCOPE, record.cohort, round_.names, round_.names[:5])
    of_another = round_.members["plant-1"].sign(mask_keys.SURVIVORS, statement)
    refuses(
        round_,
        record,
        step(signatures={**signatures, "plant-1": of_another}),
        "has told plant-1 other survivors",
    )
    _, (answer,) = member_state.advance(round_.members[NODE], record, step(signatures=signatures))
    assert answer.revealed.keys() == {*round_.names}


def test_of_no_node_both_secrets_are_revealed() -> None:
    round_ = MaskedRound(6, quorum=4)
    until(round_, "is_shared")
    for name in round_.names[4:]:
        round_.lose(name)
    round_.run()
    record = round_.records[NODE]
    assert record is not None
    assert record.survivors == round_.names[:4]
    dealt = {
        name: RoundSecrets(bytes.fromhex(each.root), SCOPE, name)
        .shares_for([NODE], record.cohort, 4)[NODE]
        .hex()
        for name, each in round_.records.items()
        if each
    }
    revealed = round_.masking.revealed[NODE]
    for name, both in dealt.items():
        assert revealed[name] == (both[66:] if name in record.survivors else both[:66])


def test_shares_that_another_node_has_made_up_are_not_revealed_and_stop_nobody() -> None:
    round_, record = reach("agreed")
    false = msgspec.structs.replace(record, shares={**record.shares, "plant-3": "00" * 82})
    _, (answer,) = member_state.advance(
        round_.members[NODE], false, step(signatures=dict(round_.masking.agreed))
    )
    assert answer.revealed.keys() == {*round_.names} - {"plant-3"}


# Rounds


def test_each_round_has_other_secrets_and_a_round_that_was_begun_goes_on() -> None:
    round_, record = reach("is_shared")
    member = round_.members[NODE]
    assert member_state.begin(member, record, 1) == record
    later = member_state.begin(member, record, 2)
    assert (later.round, later.can_mask, later.survivors) == (2, False, ())
    assert later.root != record.root
    assert member_state.begin(member._replace(run="f" * 16), record, 1).root != record.root


def test_nobody_goes_back_with_a_coordinator() -> None:
    """The same round again would be another sum of the same contributions."""
    round_, record = reach("is_shared")
    later = member_state.begin(round_.members[NODE], record, 5)
    with pytest.raises(EdgeNodeError, match=r"round 4.*round 5"):
        member_state.begin(round_.members[NODE], later, 4)


# Statistics

CLASSES = {
    "plant-0": (0, 1),
    "plant-1": (0, 1),
    "plant-2": (0, 1),
    "plant-3": (0,),
    "plant-4": (0,),
    "plant-5": (0,),
}


def test_a_class_of_one_plant_or_two_is_not_summed_whatever_the_coordinator_says() -> None:
    round_ = MaskedRound(6, classes=CLASSES)
    until(round_, "is_gathered")
    while round_.masking.shares.keys() != {*round_.names}:
        way = round_._choose()
        assert way
        round_.deliver(*way)
    record = round_.records[NODE]
    assert record is not None
    fewer = dict.fromkeys(round_.names[2:], "00" * 82)  # without plant-1, who has class 1
    said = step(counted=(NODE, *fewer), shares=fewer)
    begun = msgspec.structs.replace(record, counted=(), shares={})
    refuses(round_, begun, said, "sums class 1 over fewer than 3")
    record = msgspec.structs.replace(record, counted=round_.names)
    survivors = tuple(name for name in round_.names if name != "plant-2")
    refuses(round_, record, step(survivors=survivors), "sums class 1 over fewer than 3 nodes")


def test_sums_leave_nobody_out_whose_masks_count() -> None:
    """The same sums may come again in another round: both together would tell those of one."""
    classes = dict.fromkeys(CLASSES, (0, 1))
    round_ = MaskedRound(6, classes=classes)
    until(round_, "is_gathered")
    while round_.masking.shares.keys() != {*round_.names}:
        way = round_._choose()
        assert way
        round_.deliver(*way)
    record = round_.records[NODE]
    assert record is not None
    record = msgspec.structs.replace(record, counted=round_.names)
    survivors = tuple(name for name in round_.names if name != "plant-2")
    with pytest.raises(EdgeNodeError):
        member_state.advance(round_.members[NODE], record, step(survivors=survivors))
    member_state.advance(round_.members[NODE], record, step(survivors=round_.names))


@pytest.mark.parametrize("between", [False, True])
def test_a_later_round_of_sums_is_of_the_nodes_of_the_first_one(between: bool) -> None:
    """The coordinator may serve the first encoder again: the sums of who is in one of the two
    rounds alone would be their difference. Another run in between makes no node forget.
    """
    round_, record = reach("is_shared")
    member = round_.members[NODE]._replace(sums=lambda _: True)
    first = (*record.counted[:-1],)
    record = msgspec.structs.replace(record, summed={RUN: first})
    if between:
        record = member_state.begin(member._replace(run="f" * 16), record, 1)
    begun = member_state.begin(member, record, 7)
    begun = msgspec.structs.replace(begun, cohort=round_.records[NODE].cohort)
    for counted, missing in (((*first, "plant-5"), "plant-5"), (first[:-1], first[-1])):
        said = MaskingStep(run=RUN, round=7, counted=counted)
        with pytest.raises(EdgeNodeError, match=missing):
            member_state.advance(member, begun, said)
    said = MaskingStep(run=RUN, round=7, counted=first)
    assert member_state.advance(member, begun, said)[0].counted == first


def test_classes_are_told_under_the_signature_of_who_has_them() -> None:
    """A coordinator cannot make holders up."""
    round_ = MaskedRound(6, classes=CLASSES)
    until(round_, "is_gathered")
    record, cohort = round_.records[NODE], dict(round_.masking.keys)
    assert record is not None
    assert cohort["plant-3"].classes == (0,)
    forged = msgspec.structs.replace(cohort["plant-3"], classes=(0, 1))
    refuses(
        round_,
        record,
        step(members={**cohort, "plant-3": forged}),
        "keys of plant-3 that are not plant-3's",
    )


def test_masks_are_used_for_one_contribution() -> None:
    _, record = reach("is_shared")
    used = member_state.use_masks(record, "ab" * 32)
    assert member_state.use_masks(used, "ab" * 32) == used
    with pytest.raises(EdgeNodeError, match="trained again"):
        member_state.use_masks(used, "cd" * 32)
