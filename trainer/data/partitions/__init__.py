"""The partitions, by the names that `--partition` takes.

To add one: write its file, add its line here.
"""

from collections.abc import Mapping

from broker_config.protocol.errors import UsageError, suggest
from trainer.data.partitions.dirichlet import Dirichlet
from trainer.data.partitions.disjoint import Disjoint
from trainer.data.partitions.groups import Groups
from trainer.data.partitions.iid import Iid
from trainer.data.partitions.partition_rule import Partition
from trainer.data.partitions.sources import Sources
from trainer.data.partitions.sources_groups import SourcesGroups
from trainer.option_values import read_options

_ALL: tuple[type[Partition], ...] = (
    Disjoint,
    Dirichlet,
    Iid,
    Groups,
    Sources,
    SourcesGroups,
)
PARTITIONS = {each.name: each for each in _ALL}
DEFAULT = Disjoint.name


def make(text: str, options: Mapping[str, object]) -> Partition:
    """The partition that is written NAME, or NAME,OPTION=VALUE,... as people write it.

    Of `options`, which hold those of all partitions, it takes what it has and the text does not
    give.

    Raises:
        UsageError: there is no such partition or option, or a value is out of range.
    """
    name, *pairs = text.split(",")
    if name not in PARTITIONS:
        raise UsageError(f"there is no partition {name!r}", suggest(name, PARTITIONS))
    given = dict[str, object]()
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals or option in given:
            raise UsageError(
                f"partition {text!r} is not NAME,OPTION=VALUE, each option once",
                "write for example dirichlet,alpha=0.5",
            )
        given[option] = value
    kind = PARTITIONS[name]
    return read_options(
        kind,
        name,
        {key: value for key, value in options.items() if key in kind.__struct_fields__} | given,
    )
