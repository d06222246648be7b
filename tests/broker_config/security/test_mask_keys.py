"""Keys of a round of masked contributions: who can make what of them."""

from collections.abc import Callable

import msgspec
import pytest

from broker_config.protocol.messages import PublicKeys
from broker_config.security import mask_keys
from broker_config.security.mask_keys import RoundSecrets, Scope
from broker_config.security.secret_sharing import Interpolation
from broker_config.security.signing import ForgedError

SCOPE = Scope("steel", "0123456789abcdef", 3, "e" * 64)
NAMES = ("plant-a", "plant-b", "plant-c")


def meet(scope: Scope = SCOPE) -> tuple[dict[str, RoundSecrets], dict[str, PublicKeys]]:
    """Three nodes' secrets of a round, and its cohort."""
    own = {name: RoundSecrets(mask_keys.draw_root(), scope, name) for name in NAMES}
    return own, {name: each.public() for name, each in own.items()}


def test_two_nodes_have_one_mask_in_common_with_opposite_signs_and_no_third_one() -> None:
    own, cohort = meet()
    seeds = {
        name: dict(own[name].seeds(cohort, [each for each in NAMES if each != name]))
        for name in NAMES
    }
    a, b, c = (set(each) for each in seeds.values())
    assert [len(x & y) for x, y in ((a, b), (a, c), (b, c))] == [1, 1, 1]
    assert len(a | b | c) == 6
    for first, second in ((NAMES[0], NAMES[1]), (NAMES[1], NAMES[2])):
        (common,) = seeds[first].keys() & seeds[second].keys()
        assert seeds[first][common] == -seeds[second][common]


def test_all_that_a_node_says_in_a_round_follows_from_its_root() -> None:
    root, (_, cohort) = mask_keys.draw_root(), meet()
    one, again = (RoundSecrets(root, SCOPE, "plant-a") for _ in range(2))
    cohort["plant-a"] = one.public()
    shares = one.shares_for(NAMES, cohort, 2)
    assert again.public() == one.public()
    assert again.shares_for(NAMES, cohort, 2) == shares
    assert again.encrypt_shares(cohort, shares) == one.encrypt_shares(cohort, shares)
    assert again.seeds(cohort, NAMES[1:]) == one.seeds(cohort, NAMES[1:])


def test_another_round_has_other_seeds_also_from_the_same_root_and_keys() -> None:
    root, seeds, (_, cohort) = mask_keys.draw_root(), set[bytes](), meet()
    for scope in (
        SCOPE,
        SCOPE._replace(round=4),
        SCOPE._replace(run="f" * 16),
        SCOPE._replace(federation="other"),
    ):
        seeds |= {seed for seed, _ in RoundSecrets(root, scope, "plant-a").seeds(cohort, NAMES[1:])}
    assert len(seeds) == 12


def test_members_together_recover_what_makes_the_seeds() -> None:
    own, cohort = meet()
    dealt = own["plant-a"].shares_for(NAMES, cohort, 2)
    at, known = (
        mask_keys.points(NAMES),
        {name: mask_keys.split_pair(dealt[name]) for name in NAMES[1:]},
    )
    recovery = Interpolation([at[name] for name in known])
    agreement = recovery.combine({at[name]: pair[0] for name, pair in known.items()})
    mask = recovery.combine({at[name]: pair[1] for name, pair in known.items()})
    assert mask_keys.public_key(agreement) == cohort["plant-a"].agreement
    assert mask_keys.commitment(mask) == cohort["plant-a"].commitment
    seeds = [seed for seed, _ in own["plant-a"].seeds(cohort, NAMES[1:])]
    others = {name: cohort[name].agreement for name in NAMES[1:]}
    assert seeds == [
        mask_keys.own_seed(SCOPE, mask, "plant-a"),
        *(seed for seed, _ in mask_keys.pair_masks(SCOPE, agreement, "plant-a", others)),
    ]


def test_another_cohort_is_given_other_shares() -> None:
    """Else whoever is told two cohorts would give away more points of one polynomial than there
    may be known.
    """
    own, cohort = meet()
    _, changed = meet()
    former = own["plant-a"].shares_for(NAMES, cohort, 2)
    latter = own["plant-a"].shares_for(NAMES, cohort | {"plant-c": changed["plant-c"]}, 2)
    assert all(former[name] != latter[name] for name in NAMES)


def test_shares_are_read_by_whom_they_are_for_and_only_in_their_cohort() -> None:
    own, cohort = meet()
    shares = own["plant-a"].shares_for(NAMES, cohort, 2)
    sent = own["plant-a"].encrypt_shares(cohort, shares)
    assert own["plant-b"].decrypt_shares(cohort, {"plant-a": sent["plant-b"]}) == {
        "plant-a": shares["plant-b"]
    }
    _, changed = meet()
    for reader, sender, of in (
        ("plant-c", "plant-a", cohort),
        ("plant-b", "plant-c", cohort),
        ("plant-a", "plant-b", cohort),
        ("plant-b", "plant-a", cohort | {"plant-c": changed["plant-c"]}),
    ):
        assert own[reader].decrypt_shares(of, {sender: sent["plant-b"]}) == {}


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-2] + f"{int(text[-2:], 16) ^ 1:02x}", lambda text: text[:-2]]
)
def test_who_has_sent_no_shares_hides_nobody_elses(damage: Callable[[str], str]) -> None:
    own, cohort = meet()
    sent = {
        name: own[name].encrypt_shares(cohort, own[name].shares_for(NAMES, cohort, 2))["plant-c"]
        for name in NAMES[:2]
    }
    read = own["plant-c"].decrypt_shares(cohort, sent | {"plant-a": damage(sent["plant-a"])})
    assert read == {"plant-b": own["plant-b"].shares_for(NAMES, cohort, 2)["plant-c"]}


def test_a_key_that_nobody_can_have_is_refused() -> None:
    own, cohort = meet()
    nobody = {
        name: PublicKeys(agreement="00" * 32, cipher="00" * 32, commitment=each.commitment)
        for name, each in cohort.items()
    }
    with pytest.raises(ForgedError, match="that key"):
        own["plant-a"].seeds(nobody, NAMES[1:])
    with pytest.raises(ForgedError, match="that key"):
        own["plant-a"].encrypt_shares(nobody, {"plant-b": bytes(66)})
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    ):
        for part in ("agreement", "cipher"):
            with pytest.raises(ForgedError, match="that key"):
                mask_keys.check(msgspec.structs.replace(cohort["plant-a"], **{part: point}))
    mask_keys.check(cohort["plant-a"])
    with pytest.raises(ForgedError, match="another length"):
        mask_keys.split_pair(bytes(65))


def test_statements_are_of_one_node_round_and_cohort() -> None:
    _, cohort = meet()
    keys = cohort["plant-a"]
    said = {
        mask_keys.keys_statement(scope, node, keys)
        for scope in (SCOPE, SCOPE._replace(round=4), SCOPE._replace(run="f" * 16))
        for node in NAMES
    }
    assert len(said) == 9
    assert mask_keys.survivors_statement(
        SCOPE, cohort, NAMES, NAMES[:2]
    ) != mask_keys.survivors_statement(SCOPE, cohort, NAMES[:2], NAMES[:2])
