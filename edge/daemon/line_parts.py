"""Parts of a line that follow its settings: how they are opened, and which of them stay."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from broker_config.protocol.errors import UsageError
from edge.config.instance import Instance
from edge.inference.pipeline import Source
from edge.sources.source import SourceSettings

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier
    from edge.registry.rollout import Rollout


def open_sources(wanted: Iterable[SourceSettings], instance: Instance) -> list[Source]:
    """The sources, opened; EdgeNodeError when one cannot be, UsageError when one is given twice."""
    sources: list[Source] = []
    for each in wanted:
        source = each.open_source(instance)
        if source.name in [other.name for other in sources]:
            raise UsageError(f"{source.name} is given twice as a source", "leave one of them out")
        sources.append(source)
    return sources


class ServedLine(NamedTuple):
    """A running line, as a part sees it that a package adds."""

    instance: Instance
    rollout: "Rollout"  # its `store` holds the line's bundles
    verifier: "Verifier | None"  # None: bundles are served whoever has signed them


class AddedPartSettings(Protocol):
    """Settings of a part that a package adds to a line, a msgspec struct;
    what it registers among `edge_node.line_parts`.

    The name of the entry point is the part's table in the line's TOML file:
    `doorbell = "package.doorbell:Settings"` is `[doorbell]`.
    """

    def open_part(self, line: ServedLine) -> AbstractContextManager[object]:
        """Open the part, which works until its context ends; EdgeNodeError when it cannot."""


class Part(Protocol):
    """Something that was made from its settings, `wanted`."""

    @property
    def wanted(self) -> Any:
        """Its settings."""


P = TypeVar("P", bound=Part)
W = TypeVar("W")


def diff(current: Sequence[P], wanted: Sequence[W]) -> tuple[list[P], list[W], list[P]]:
    """Which current parts stay, which settings have no part yet,
    and which parts are no longer wanted.
    """
    old = list(current)
    kept = []
    missing = []
    for each in wanted:
        found = next((part for part in old if part.wanted == each), None)
        if found is None:
            missing.append(each)
        else:
            old.remove(found)
            kept.append(found)
    return kept, missing, old
