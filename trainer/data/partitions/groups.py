"""Groups of nodes with classes_per_node classes that no other group has."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec
from numpy.random import Generator

from broker_config.protocol.errors import UsageError
from trainer.data.partitions.partition_rule import Partition, check_classes, count_evenly


class Groups(Partition, frozen=True):
    """Label skew (Peng et al., 2022, 4.2.1); the last group has the classes that are left."""

    name = "groups"

    classes_per_node: Annotated[int, msgspec.Meta(ge=1)] = 2

    def check(self, sources: Sequence[Sequence[str]], nodes: int, samples: int) -> None:
        """Each group of each source must have a node."""
        each = self.classes_per_node
        for classes in sources:
            check_classes(each, classes, samples)
        groups = [-(-len(classes) // each) for classes in sources]
        needed = max(first + 1 + (count - 1) * len(sources) for first, count in enumerate(groups))
        for first, (classes, count) in enumerate(zip(sources, groups, strict=True)):
            mine = len(range(first, nodes, len(sources)))
            if mine < count:
                of_source = f"the nodes of source {first + 1}, {mine} of {nodes},"
                source = of_source if len(sources) > 1 else f"{mine} nodes"
                raise UsageError(
                    f"{source} cannot have {count} "
                    f"groups of {each} of {len(classes)} classes, one each",
                    f"take --nodes {needed} or more, or more --classes-per-node",
                )

    def count(
        self, classes: Sequence[str], nodes: int, samples: int, random: Generator
    ) -> list[Counter[str]]:
        """Nodes are dealt to groups in turn, which are the same in sources with the same
        classes.
        """
        each = self.classes_per_node
        shuffled = [str(name) for name in random.permutation(classes)]
        groups = [shuffled[first : first + each] for first in range(0, len(shuffled), each)]
        return [count_evenly(groups[number % len(groups)], samples) for number in range(nodes)]
