"""The partitions, by the names that `--partition` takes. To add one: write its file, add its line here."""

from collections.abc import Mapping

import msgspec

from broker_config.protocol.errors import UsageError, suggest
from trainer.data.partitions.dirichlet import Dirichlet
from trainer.data.partitions.disjoint import Disjoint
from trainer.data.partitions.groups import Groups
from trainer.data.partitions.iid import Iid
from trainer.data.partitions.partition_rule import Partition
from trainer.data.partitions.sources import Sources
from trainer.data.partitions.sources_groups import SourcesGroups

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

    Of `options`, which hold those of all partitions, it takes what it has and the text does not give.

    Raises:
        UsageError: it has no such option, or a value is out of range.
    """
    name, *pairs = text.split(",")
    given = dict(pair.partition("=")[::2] for pair in pairs)
    known = PARTITIONS[name].__struct_fields__
    for option in given:
        if option not in known:
            raise UsageError(f"{name} has no option {option!r}", suggest(option, known))
    try:
        return msgspec.convert({**options, **given}, PARTITIONS[name], strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"an option of {name} cannot have this value: {error}", "give it a value in its range"
        ) from error
