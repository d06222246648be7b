"""How many nodes share their secrets with how many others."""

import numpy as np
import pytest
from scipy.stats import hypergeom

from trainer.federation.masking import (
    LEAST_NODES,
    MOST_NODES,
    count_neighbours,
    least_neighbours,
    least_nodes,
    least_threshold,
    shares_needed,
)

MANY = [201, 300, 500, MOST_NODES]


@pytest.mark.parametrize("nodes", MANY)
def test_neighbours_are_so_many_that_a_quarter_cannot_collude_and_a_third_may_be_lost(
    nodes: int,
) -> None:
    def suffices(count: int) -> bool:
        colluding = nodes * hypergeom.sf(count // 2 - 1, nodes - 1, nodes // 4, count)
        lost = nodes * hypergeom.cdf(count // 2 - 1, nodes - 1, nodes - 1 - nodes // 3, count)
        return bool(colluding <= 2**-40 and lost <= 1e-4)

    count = least_neighbours(nodes)
    assert count % 2 == 0
    assert suffices(count)
    assert not suffices(count - 2)
    # a coordinator may leave a third out
    for cohort in np.linspace(least_threshold(nodes), nodes, 9).astype(int):
        assert cohort * hypergeom.sf(count // 2 - 1, cohort - 1, cohort // 4, count) <= 2**-40
    assert shares_needed(nodes, count, nodes) == count // 2


def test_up_to_two_hundred_nodes_share_with_all() -> None:
    assert [least_neighbours(nodes) for nodes in (3, 10, 200)] == [0, 0, 0]
    assert (count_neighbours(0, 200), shares_needed(134, 0, 200)) == (199, 134)
    # all are neighbours
    assert (count_neighbours(180, 181), shares_needed(134, 180, 181)) == (180, 134)
    assert (count_neighbours(180, 182), shares_needed(134, 180, 182)) == (180, 90)


@pytest.mark.parametrize("nodes", MANY)
def test_whoever_is_named_as_lost_the_others_are_not_cut_into_small_sums(nodes: int) -> None:
    """The bound of docs/security.md: a set of honest survivors that has masks with no others is
    an eighth of a cohort.

    Each of them sees half of its own neighbours survive: in the set, or among a quarter that
    collude. By the union over all sets of one size there is none with a probability above 2^-40.
    """
    count = least_neighbours(nodes)
    for cohort in (least_threshold(nodes), nodes):
        for size in range(1, cohort // 8):
            sets = np.sum(
                np.log2(np.arange(cohort - size + 1, cohort + 1)) - np.log2(np.arange(1, size + 1))
            )
            one = hypergeom.logsf(
                count // 2 - 1, cohort - 1, size - 1 + cohort // 4, count
            ) / np.log(2)
            assert sets + size * one <= -40, (cohort, size)


@pytest.mark.parametrize("summed", range(1, 100))
def test_a_federation_of_the_least_nodes_has_sums_of_so_many_and_a_smaller_one_has_not(
    summed: int,
) -> None:
    nodes = least_nodes(summed)
    assert least_threshold(nodes) >= summed
    assert nodes == LEAST_NODES or least_threshold(nodes - 1) < summed
