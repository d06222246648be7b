"""What one sensor can repeat while a round is open."""

from edge_node.extensions.vfl.server.round_allowance import RoundAllowance
from trainer.federation.server.membership import WINDOW


def test_a_sensor_has_so_many_rounds_worth_anew_with_every_round() -> None:
    allowance = RoundAllowance(3)
    assert [allowance.spend("oven", 1, now=0.1) for _ in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    allowance.renew(now=0.2)
    assert allowance.spend("oven", 1, now=0.3)


def test_one_sensor_spends_nothing_of_anothers() -> None:
    allowance = RoundAllowance(1)
    assert allowance.spend("oven", 1, now=0.1)
    assert allowance.spend("press", 1, now=0.1)


def test_what_is_too_much_at_once_is_not_taken_and_smaller_parts_are() -> None:
    allowance = RoundAllowance(2)
    assert not allowance.spend("oven", 2.5, now=0.1)
    assert [allowance.spend("oven", 0.75, now=0.1) for _ in range(3)] == [True, True, False]


def test_who_waits_for_a_round_that_stays_open_is_served_again_after_a_while() -> None:
    allowance = RoundAllowance(1)
    assert allowance.spend("oven", 1, now=0.1)
    assert not allowance.spend("oven", 1, now=WINDOW)
    assert allowance.spend("oven", 1, now=WINDOW + 0.1)
