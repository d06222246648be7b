"""Contributions that only their sum can be read of: the grid that they lie on, their masks,
who takes them away.

With the limits of whoever takes part.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from math import comb

LEAST_NODES = 3
MOST_NODES = 1000
_ALL_SHARE = 200  # nodes; up to so many share their secrets with all others
_FITTING = 400  # shares into a message, with names of any length
# how probable it may be that a quarter of a cohort, or a third's loss, is too much
_COLLUDING = 2**-40
_LOST = 1e-4


@lru_cache
def least_neighbours(nodes: int) -> int:
    """With how many others, chosen at random, each of so many nodes shares its secrets,
    if not with all; 0: with all.

    Half of them have to reveal a share (Bell et al. 2020, Secure single-server aggregation with
    (poly)logarithmic overhead). The least even number so that a quarter of a cohort are half of any
    node's neighbours with a probability of 2^-40 at most, and that a third of them, if they are
    lost, leave fewer than half with one of 10^-4. Of a smaller cohort than all it holds the more.
    """
    if nodes <= _ALL_SHARE:
        return 0
    others = nodes - 1
    count = 2
    while (
        nodes * _probability(count // 2, count, nodes // 4, others) > _COLLUDING
        or nodes * _probability(count // 2 + 1, count, nodes // 3, others) > _LOST
    ):
        count += 2
    return count


def most_neighbours(nodes: int) -> int:
    """With how many others each of so many nodes may share its secrets at most,
    if not with all; 0: with all.
    """
    return 0 if nodes <= _ALL_SHARE else _FITTING


def _probability(least: int, drawn: int, marked: int, among: int) -> float:
    """That so many or more of those `drawn` are `marked`:
    the hypergeometric distribution's upper tail.
    """
    found = sum(
        comb(marked, each) * comb(among - marked, drawn - each) for each in range(least, drawn + 1)
    )
    return found / comb(among, drawn)


def count_neighbours(neighbours: int, cohort: int) -> int:
    """With how many others a node of a cohort of so many shares its secrets;
    `neighbours` is the spec's.
    """
    return neighbours if 0 < neighbours < cohort - 1 else cohort - 1


def shares_needed(threshold: int, neighbours: int, cohort: int) -> int:
    """How many shares make a secret in a cohort of so many nodes."""
    shared = count_neighbours(neighbours, cohort)
    return threshold if shared == cohort - 1 else shared // 2


def scarce_classes(held: Iterable[Iterable[int]]) -> list[int]:
    """Classes of which a sum would tell of one plant or two: that some have,
    and fewer than LEAST_NODES.

    Args:
        held: the classes of each node whose statistics are summed.
    """
    holders = Counter(chain.from_iterable(set(labels) for labels in held))
    return sorted(label for label, count in holders.items() if count < LEAST_NODES)


def least_threshold(nodes: int) -> int:
    """How few of so many nodes may unmask a sum: two thirds, rounded up.

    Two lists of survivors of one round would each need as many nodes' answers, and no honest node
    answers two: so there is one, unless a third of the nodes or more side with the coordinator.
    """
    return -(-2 * nodes // 3)


def least_nodes(summed: int) -> int:
    """Return how many nodes a federation needs, so that only sums of `summed` or more are read."""
    return max(LEAST_NODES, 3 * (summed - 1) // 2 + 1)
