"""Contributions that only their sum can be read of: the grid that they lie on, their masks, who takes them away.

With the limits of whoever takes part.
"""

from collections import Counter
from collections.abc import Iterable

from broker_config.protocol.codec import MAX_MESSAGE

LEAST_NODES = 3
_MOST_NODES = 200
_MEMBER, _CLASS = 475, 4  # bytes of a node's keys in a message, its name included, and of each class that it tells


def most_nodes(classes: int) -> int:
    """How many nodes can be told each other's keys in one message, each with up to so many classes."""
    return min(_MOST_NODES, (MAX_MESSAGE - 200) // (_MEMBER + _CLASS * classes))


def scarce_classes(held: Iterable[Iterable[int]]) -> list[int]:
    """Classes of which a sum would tell of one plant or two: that some have, and fewer than LEAST_NODES.

    Args:
        held: the classes of each node whose statistics are summed.
    """
    holders = Counter(label for labels in held for label in set(labels))
    return sorted(label for label, count in holders.items() if count < LEAST_NODES)


def least_threshold(nodes: int) -> int:
    """How few of so many nodes may unmask a sum: two thirds, rounded up.

    Two lists of survivors of one round would each need as many nodes' answers, and no honest node answers two: so there
    is one, unless a third of the nodes or more side with the coordinator.
    """
    return -(-2 * nodes // 3)
