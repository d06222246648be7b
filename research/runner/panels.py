"""Finished cells by data set and scenario, then by variant, then by seed,
as tables and figures show them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

C = TypeVar("C")  # cell
F = TypeVar("F")  # finished cell


class Entry(NamedTuple, Generic[C]):
    """A cell by the names that tables and figures have for it."""

    variant: str
    data: str
    scenario: str
    cell: C


class Panel(NamedTuple, Generic[F]):
    """A data set in a scenario."""

    data: str
    scenario: str
    # of which some are finished, in the order of the grid; by seed
    variants: Mapping[str, Mapping[int, F]]
    names: Sequence[str]  # of all variants of the grid

    @property
    def results(self) -> Iterator[F]:
        """All finished cells."""
        return (each for seeds in self.variants.values() for each in seeds.values())


def arrange(entries: Sequence[Entry[Any]], finished: Mapping[str, F]) -> list[Panel[F]]:
    """The panels of a grid, as far as it is finished."""
    places: dict[tuple[str, str], dict[str, dict[int, F]]] = {}
    for variant, *place, cell in entries:
        if cell.key in finished:
            found = places.setdefault((place[0], place[1]), {})
            found.setdefault(variant, {})[cell.seed] = finished[cell.key]
    names = list(dict.fromkeys(entry.variant for entry in entries))
    return [
        Panel(*place, {name: variants[name] for name in names if name in variants}, names)
        for place, variants in places.items()
    ]


def shown_variants(panels: Sequence[Panel[Any]]) -> list[str]:
    """The variants of which any panel has some, in the order of the grid."""
    there = {name for panel in panels for name in panel.variants}
    return [
        name
        for name in dict.fromkeys(name for panel in panels for name in panel.names)
        if name in there
    ]
