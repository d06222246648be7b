"""FedTFI's bank of patches: bounded, fair, the same whatever came first,
without leavers and without one's own.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_node.extensions.textures import patch_bank
from trainer.models.named_tensors import Arrays

NODES = ("a", "b", "c", "d")
OWNERS = {patch_bank.hash_owner(node): node for node in NODES}


def sends(marks: list[float], labels: list[int] | None = None) -> Arrays:
    """Patches [n, 1, 1, 1] of these values."""
    values = np.asarray(marks, np.float32).reshape(-1, 1, 1, 1)
    return {
        patch_bank.VALUES: values,
        patch_bank.LABELS: np.asarray(labels or [0] * len(marks), np.float32),
    }


def held(found: Arrays) -> list[tuple[str, float]]:
    """Owner and value of each patch, in the bank's order."""
    there = found["bank.labels"] >= 0
    owners = [OWNERS[int(each)] for each in found["bank.owners"][there]]
    return [*zip(owners, found["bank.patches"][there].ravel().tolist(), strict=True)]


def by_node(found: Arrays) -> dict[str, list[float]]:
    return {
        node: [value for owner, value in held(found) if owner == node]
        for node in {o for o, _ in held(found)}
    }


rounds = st.lists(
    st.dictionaries(st.sampled_from(NODES), st.integers(0, 6), max_size=4), min_size=1, max_size=5
)  # how many patches each node sends in each round


@given(capacity=st.integers(1, 14), story=rounds)
def test_a_bank_is_bounded_full_and_as_fair_as_can_be(
    capacity: int, story: list[dict[str, int]]
) -> None:
    found, mark, ever = (
        patch_bank.make_empty_bank(capacity, 1, 1),
        itertools.count(1),
        Counter[str](),
    )
    for sent in story:
        found = {
            **found,
            **patch_bank.merge(
                found, {n: sends([next(mark) for _ in range(k)]) for n, k in sent.items()}, ()
            ),
        }
        ever.update(sent)
        counts = {node: len(values) for node, values in by_node(found).items()}
        assert {name: values.shape for name, values in found.items()} == {
            "bank.patches": (capacity, 1, 1, 1),
            "bank.labels": (capacity,),
            "bank.owners": (capacity,),
        }
        most = max(counts.values(), default=0)
        for node, all_of_it in ever.items():
            assert (
                counts.get(node, 0) >= min(all_of_it, most - 1) or sum(counts.values()) < capacity
            )
    if sum(ever.values()) <= capacity:
        assert sum(len(values) for values in by_node(found).values()) == sum(ever.values())


@given(order=st.permutations(NODES), capacity=st.integers(1, 12))
def test_the_order_in_which_contributions_came_makes_no_difference(
    order: list[str], capacity: int
) -> None:
    came = {node: sends([float(ord(node)), float(ord(node)) + 0.5, 1.0]) for node in NODES}
    merged = patch_bank.merge(patch_bank.make_empty_bank(capacity, 1, 1), came, ())
    otherwise = patch_bank.merge(
        patch_bank.make_empty_bank(capacity, 1, 1), {node: came[node] for node in order}, ()
    )
    assert all(merged[name].tobytes() == otherwise[name].tobytes() for name in merged)


def test_new_patches_go_before_older_ones_which_stay_while_there_is_room() -> None:
    first = patch_bank.merge(
        patch_bank.make_empty_bank(5, 1, 1), {"a": sends([1, 2]), "b": sends([3])}, ()
    )
    second = patch_bank.merge(first, {"a": sends([4, 5])}, ())
    assert by_node(second) == {"a": [4, 5, 1, 2], "b": [3]}
    third = patch_bank.merge(second, {"a": sends([6]), "b": sends([7, 8])}, ())
    assert by_node(third) == {"a": [6, 4], "b": [7, 8, 3]} or by_node(third) == {
        "a": [6, 4, 5],
        "b": [7, 8],
    }


def test_who_was_to_contribute_and_did_not_has_no_patches_in_the_next_bank() -> None:
    first = patch_bank.merge(
        patch_bank.make_empty_bank(9, 1, 1), {node: sends([1, 2]) for node in "abc"}, ()
    )
    assert by_node(patch_bank.merge(first, {"a": sends([3])}, {"b"})) == {
        "a": [3, 1, 2],
        "c": [1, 2],
    }


def test_a_node_whose_name_shares_anothers_number_takes_none_of_its_places() -> None:
    """Such names are found within seconds."""
    liar, victim = "node-1094", "node-5787"
    assert patch_bank.hash_owner(liar) == patch_bank.hash_owner(victim)
    bank = patch_bank.make_empty_bank(9, 1, 1)
    sent = {
        liar: sends([1, 2, 3, 4, 5, 6]),
        victim: sends([11, 12, 13, 14, 15, 16]),
        "a": sends([21, 22, 23, 24]),
    }
    for _ in range(2):
        bank = patch_bank.merge(bank, sent, ())
        assert sorted(bank["bank.patches"].ravel().tolist()) == [1, 2, 3, 11, 12, 13, 21, 22, 23]


def test_a_label_of_minus_one_is_no_patch_and_takes_no_place() -> None:
    found = patch_bank.merge(
        patch_bank.make_empty_bank(3, 1, 1), {"a": sends([1, 2, 3, 4], [-1, 1, -1, 0])}, ()
    )
    assert held(found) == [("a", 2), ("a", 4)]
    assert found["bank.labels"].tolist() == [1, 0, -1]


def test_a_node_does_not_see_its_own_patches_and_all_others() -> None:
    broadcast = patch_bank.merge(
        patch_bank.make_empty_bank(9, 1, 1), {node: sends([1, 2]) for node in "abc"}, ()
    )
    for node in NODES:
        seen = patch_bank.remove_own_patches({**broadcast, "encoder.x": np.ones(1)}, node)
        assert by_node(seen).keys() == {"a", "b", "c"} - {node}
        assert "encoder.x" in seen
    assert by_node(broadcast).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"labels": [0, 3, 1]}, "labelled 3; labels are 0 to 2"),
        ({"labels": [0, -2, 1]}, "labelled -2"),
        ({"labels": [0, 0.5, 1]}, r"labelled 0\.5"),
        ({"marks": [0, 1e30, 1]}, "beyond"),
        ({"marks": [0, -257, 1]}, "beyond"),
    ],
)
def test_what_an_honest_node_cannot_send_is_refused(
    change: dict[str, list[float]], complaint: str
) -> None:
    patch_bank.check(sends([0, 256, -256], [-1, 0, 2]), 3)
    sent = sends(change.get("marks", [1, 2, 3]), change.get("labels"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint):
        patch_bank.check(sent, 3)
