"""One source (--data) for each node, its classes evenly."""

from trainer.data.partitions.iid import Iid
from trainer.data.partitions.partition_rule import Partition


class Sources(Partition, frozen=True):
    """Feature skew."""

    name = "sources"

    def within_source(self) -> Iid:
        """Evenly."""
        return Iid()
