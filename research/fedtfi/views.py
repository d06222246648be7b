"""Finished cells as tables and figures show them: by data set and scenario its variants, for each of them its seeds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from research.fedtfi.cell import Finished
from research.fedtfi.grids import Entry


class Panel(NamedTuple):
    """A data set in a scenario: by variant, in the order of the grid, its seeds."""

    data: str
    scenario: str
    variants: Mapping[str, Mapping[int, Finished]]  # those of which some are finished
    names: Sequence[str]  # of all variants of the grid

    @property
    def results(self) -> Iterator[Finished]:
        """All of it."""
        return (each for seeds in self.variants.values() for each in seeds.values())


def panels(entries: Sequence[Entry], finished: Mapping[str, Finished]) -> list[Panel]:
    """What is finished of a grid."""
    found: dict[tuple[str, str], dict[str, dict[int, Finished]]] = {}
    for name, scenario, cell in entries:
        if there := finished.get(cell.key):
            found.setdefault((cell.setting.data, scenario), {}).setdefault(name, {})[cell.seed] = there
    names = list(dict.fromkeys(entry.variant for entry in entries))
    return [
        Panel(*place, {name: variants[name] for name in names if name in variants}, names)
        for place, variants in found.items()
    ]


def shown(panels: Sequence[Panel]) -> list[str]:
    """The variants of which any panel has some, in the order of the grid."""
    there = {name for panel in panels for name in panel.variants}
    return [name for name in dict.fromkeys(name for panel in panels for name in panel.names) if name in there]
