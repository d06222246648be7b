"""Registries of named things, such as methods and sinks, which installed packages extend.

A package registers a thing as an entry point: its name, and where it is in the package. The kernel
registers its own things in the same way, in `pyproject.toml`:

    [project.entry-points."edge_node.sinks"]
    csv = "edge.sinks.csv:Settings"

What needs more than the package itself names the extra that brings it:

    syslog = "plant_syslog:Settings [syslog]"
"""

from collections.abc import Iterator, MutableMapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from broker_config.protocol.errors import UsageError

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """Things by name, in alphabetical order. A thing is imported when it is first asked for.

    Args:
        kind: of the things, in the plural: `sinks` are entry points of the group `edge_node.sinks`.
        needed: whether the kernel itself has some.

    Raises:
        UsageError: nothing is registered though some are needed, two packages register one name,
            or a thing cannot be imported.
    """

    def __init__(self, kind: str, *, needed: bool = True) -> None:
        self._kind = kind
        self._needed = needed
        self._loaded: dict[str, T] = {}

    @cached_property
    def _registered(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for each in entry_points(group=f"edge_node.{self._kind}"):
            other = found.setdefault(each.name, each)
            if other.value != each.value:
                raise UsageError(
                    f"{each.name!r} is registered twice among the {self._kind}: {other.value} and "
                    f"{each.value}",
                    "uninstall one of the two packages",
                )
        if self._needed and not found:
            raise UsageError(
                f"no {self._kind} are registered: edge-node is not installed here",
                "install it, from a checkout with pip install -e .",
            )
        return found

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = self._load(self._registered[name])
        return self._loaded[name]

    def __setitem__(self, name: str, thing: T) -> None:
        self._loaded[name] = thing

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._registered.keys() | self._loaded.keys()))

    def __len__(self) -> int:
        return len(self._registered.keys() | self._loaded.keys())

    def _load(self, registered: EntryPoint) -> T:
        package = registered.dist.name if registered.dist else registered.module
        try:
            thing: T = registered.load()
        except (ImportError, AttributeError) as error:
            remedy = f"update or uninstall {package}"
            if registered.extras:
                remedy = f"install what it needs: pip install '{package}[{registered.extras[0]}]'"
            raise UsageError(
                f"{registered.name!r} among the {self._kind} cannot be imported: {error}", remedy
            ) from error
        return thing
