"""A node's account: all that it has released, once each."""

import math
from collections.abc import Sequence

import pytest

from broker_config.protocol.errors import EdgeNodeError
from trainer.privacy.epsilon import spent_epsilon
from trainer.privacy.spent_account import Account, Release


def test_what_is_made_again_is_counted_once_and_anything_else_adds_up() -> None:
    account = Account()
    assert account.epsilon == 0
    account.spend("run", 1, "basis", 0.25)
    account.spend("run", 1, "basis", 0.25)
    assert account.epsilon == spent_epsilon(0.5)
    account.spend("run", 1, "another basis", 0.25)
    account.spend("run", 2, "basis", 0.25)
    account.spend("a later run", 1, "basis", 0.25)
    assert account.epsilon == spent_epsilon(1.0)


def test_it_is_written_down_before_anything_is_made() -> None:
    kept: list[Sequence[Release]] = []
    account = Account(keep=kept.append)
    account.spend("run", 1, "basis", 0.25)
    account.spend("run", 1, "basis", 0.25)
    assert kept == [[Release(run="run", round=1, basis="basis", squared=0.25)]]
    assert Account(kept[0]).epsilon == account.epsilon

    def fail(_: Sequence[Release]) -> None:
        raise EdgeNodeError("the disk is full", "make room")

    broken = Account(keep=fail)
    with pytest.raises(EdgeNodeError, match="full"):
        broken.spend("run", 1, "basis", 0.25)
    assert broken.epsilon == 0


def test_no_more_is_spent_than_a_plant_demands() -> None:
    account = Account(most=spent_epsilon(1.0) + 1e-9)
    for round_ in range(4):
        account.spend("run", round_, "basis", 0.25)
    with pytest.raises(EdgeNodeError, match=r"round 4.*4\.98.*4\.38"):
        account.spend("run", 4, "basis", 0.25)
    account.spend("run", 3, "basis", 0.25)
    assert account.epsilon == spent_epsilon(1.0)


@pytest.mark.parametrize("squared", [math.nan, math.inf])
def test_what_costs_no_finite_epsilon_is_refused_by_a_plant_that_demands_one(
    squared: float,
) -> None:
    account = Account(most=5)
    with pytest.raises(EdgeNodeError):
        account.spend("1" * 16, 1, "basis", squared)
    assert account.epsilon == 0
