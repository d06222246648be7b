"""Parts of a line that follow its settings: how they are opened, and which of them stay."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from broker_config.protocol.errors import UsageError
from edge.config.instance import Instance
from edge.daemon import line_settings
from edge.inference.pipeline import Source
from edge_node.extensions.bundle_delivery import bundle_messages

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier
    from edge.registry.rollout import Rollout
    from edge_node.extensions.bundle_delivery.bundle_receiver import BundleReceiver


def open_sources(wanted: Iterable[line_settings.Source], instance: Instance) -> list[Source]:
    """The sources, opened; EdgeNodeError when one cannot be, UsageError when one is given twice."""
    sources: list[Source] = []
    for each in wanted:
        source = each.open_source(instance)
        if source.name in [other.name for other in sources]:
            raise UsageError(f"{source.name} is given twice as a source", "leave one of them out")
        sources.append(source)
    return sources


def open_bundle_receiver(
    wanted: bundle_messages.Settings,
    instance: Instance,
    rollout: "Rollout",
    verifier: "Verifier | None",
) -> "BundleReceiver":
    """The receiver of bundles from the plant's broker;
    UsageError when the settings or a missing verifier forbid it.
    """
    # Only loaded where it is used
    from edge_node.extensions.bundle_delivery.bundle_receiver import BundleReceiver  # noqa: PLC0415

    return BundleReceiver(wanted, instance.line, rollout, verifier)


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
