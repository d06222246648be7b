"""The same number of each class for every node."""

from collections import Counter
from collections.abc import Sequence

from numpy.random import Generator

from trainer.data.partitions.partition_rule import Partition, count_evenly


class Iid(Partition, frozen=True):
    """No skew."""

    name = "iid"

    def count(
        self,
        classes: Sequence[str],
        nodes: int,
        samples: int,
        random: Generator,  # noqa: ARG002
    ) -> list[Counter[str]]:
        """What cannot be split goes to the first classes, one each."""
        return [count_evenly(classes, samples)] * nodes
