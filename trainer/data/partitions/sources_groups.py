"""One source (--data) for each node, groups of nodes within each."""

from trainer.data.partitions.groups import Groups


class SourcesGroups(Groups, frozen=True):
    """Feature skew and label skew."""

    name = "sources_groups"

    def within_source(self) -> Groups:
        """In groups of nodes."""
        return Groups(self.classes_per_node)
