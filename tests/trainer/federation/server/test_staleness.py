"""Late contributions, made fit for a newer broadcast than they were trained from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.federation.server.staleness import discount, rebase

NUMBERS = st.floats(-100, 100, width=32)


def scalars(**values: float) -> dict[str, np.ndarray]:
    return {name: np.float32([value]) for name, value in values.items()}


def test_the_older_an_update_the_less_of_it_counts() -> None:
    assert [discount(behind) for behind in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])


def test_what_a_node_has_changed_is_added_to_the_newer_broadcast_at_a_discount() -> None:
    moved = rebase(scalars(w=5), trained_from=scalars(w=1), broadcast=scalars(w=10), behind=3)
    assert moved["w"] == 10 + (5 - 1) / 2
    assert moved["w"].dtype == np.float32


@given(NUMBERS, NUMBERS, st.integers(1, 1000))
def test_a_node_that_has_changed_nothing_keeps_the_newer_broadcast_to_the_bit(
    old: float, new: float, behind: int
) -> None:
    assert rebase(scalars(w=old), scalars(w=old), scalars(w=new), behind)["w"] == np.float32(new)


def test_a_variance_stays_one() -> None:
    name = "norm.running_var"
    moved = rebase({name: np.float32([0.0])}, {name: np.float32([9.0])}, {name: np.float32([1.0])}, behind=1)
    assert moved[name] == 0


def test_what_is_relayed_stays_as_it_is() -> None:
    patches = {"patches.values": np.float32([3.0])}
    assert rebase(patches, scalars(w=1), scalars(w=2), behind=5) == patches
