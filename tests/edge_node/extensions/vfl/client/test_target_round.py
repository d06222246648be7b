"""How long a sensor waits for rows that it lacks, where rounds need not wait for ever."""

from collections.abc import Iterable

from edge_node.extensions.vfl.client.target_round import MissingRows


class Rounds:
    """One round after another, with a patience of five seconds."""

    def __init__(self) -> None:
        self.lacking = MissingRows(5.0)

    def wait(
        self, products: Iterable[str], lacking: Iterable[str], waited: float, now: float
    ) -> bool:
        self.lacking, waits = self.lacking.check([*products], {*lacking}, waited, now)
        return waits


def test_one_lacking_product_is_waited_for_once_and_later_ones_while_they_come_in_time() -> None:
    rounds = Rounds()
    assert rounds.wait("ab", "a", waited=4.0, now=4.0)
    assert not rounds.wait("ab", "a", waited=5.0, now=5.0)
    assert not rounds.wait("ab", "a", waited=0.0, now=6.0)
    assert rounds.wait("abc", "ac", waited=0.0, now=7.0)
    assert not rounds.wait("abc", "a", waited=1.0, now=8.0)


def test_a_file_that_lags_costs_one_wait_until_rows_come_in_time_again() -> None:
    rounds = Rounds()
    assert not rounds.wait("a", "a", waited=5.0, now=5.0)
    assert not rounds.wait("ab", "ab", waited=0.0, now=6.0)
    assert not rounds.wait("bc", "c", waited=0.0, now=12.0)  # b came, but late
    assert rounds.wait("cd", "d", waited=0.0, now=13.0)  # c came in time
