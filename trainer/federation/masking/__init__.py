"""Contributions that only their sum can be read of: the grid that they lie on, their masks, who takes them away.

With the limits of whoever takes part.
"""

LEAST_NODES = 3
MOST_NODES = 200


def least_threshold(nodes: int) -> int:
    """How few of so many nodes may unmask a sum: two thirds, rounded up.

    Two lists of survivors of one round would each need as many nodes' answers, and no honest node answers two: so there
    is one, unless a third of the nodes or more side with the coordinator.
    """
    return -(-2 * nodes // 3)
