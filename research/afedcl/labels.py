"""Labels of cells for people: a cell's variant, in what cells of one label differ,
what cells have in common.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import msgspec

from research.afedcl.cell import Cell

_FIRST = {
    "local": "No-FL",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
}
_THEN = {
    "fedbn": "FedBN",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "ditto": "Ditto",
    "fedala": "FedALA",
}
_LAST = {
    "fenda": "FENDA",
    "pfedfda": "pFedFDA",
    "gaussian": "Gaussian",
    "afedcl_plus": "AFedCL+",
    "afedcl": "AFedCL",
}
METHODS = {**_FIRST, **_THEN, **_LAST}  # in the order of tables

# Options of AFedCL that leave a part of it out: Fig. 4 and Fig. 10.
_PARTS = {
    "adversarial update": ("lambda", 0),
    "consensus-aware weights": ("weights", "equal"),
    "fusion": ("fusion", "none"),
}

PARTITIONS = {
    "disjoint": "disjoint",
    "disjoint,deal=random": "disjoint, drawn",
    "dirichlet": "Dirichlet",
    "iid": "IID",
}


def label(cell: Cell) -> str:
    """The variant of a method that a cell runs, such as `AFedCL without adversarial update`."""
    name = METHODS.get(cell.method, cell.method)
    if cell.head:
        name += " + statistics"
    if not (parts := _left_out(cell)):
        return name
    *others, last = parts
    return f"{name} without {', '.join(others)} and {last}" if others else f"{name} without {last}"


def rank(method: str) -> int:
    """Where tables list a method: No-FL first, AFedCL last,
    one that the papers do not have just before it.
    """
    return [*METHODS].index(method) if method in METHODS else len(METHODS) - 2


def order(cell: Cell) -> tuple[int, str, int, bool, str]:
    """Sorts variants as tables list them: within AFedCL the complete one,
    with its own classifier, comes last.
    """
    return rank(cell.method), cell.method, -len(_left_out(cell)), not cell.head, label(cell)


def names(cells: Iterable[Cell], place: Callable[[Cell], Hashable]) -> dict[str, str]:
    """A name of each cell's variant by the cell's key.

    Cells of one label, place (where a table or figure puts them) and seed must differ in something:
    that is added to the names of this label, as in `FedAvg (epochs 6)`, so that no two of them are
    ever averaged.
    """
    rivals = defaultdict(list)
    for cell in (cells := list(cells)):
        rivals[label(cell), place(cell), cell.seed].append(_fields(cell))
    differing: dict[str, dict[str, None]] = defaultdict(dict)
    for (title, _, _), fields in rivals.items():
        known = dict.fromkeys(name for each in fields for name in each)
        differing[title] |= {
            name: None for name in known if len({str(each.get(name)) for each in fields}) > 1
        }
    return {
        cell.key: label(cell) + _bracketed(_fields(cell), differing[label(cell)]) for cell in cells
    }


def settings(cell: Cell) -> dict[str, str]:
    """What may be tuned: a cell's options and training."""
    epochs = cell.training.local_epochs
    options = {
        name: epochs if name.endswith("epochs") and value == 0 else value
        for name, value in cell.options.items()
    }
    return {
        name: str(value) for name, value in (options | msgspec.to_builtins(cell.training)).items()
    }


def partition(cell: Cell) -> str:
    """The name of a cell's partition."""
    return PARTITIONS.get(cell.setting.partition, cell.setting.partition)


def conditions(cells: Iterable[Cell]) -> str:
    """What a table or a figure shows, in a line: seeds, rounds, size, network,
    weights and torch.
    """
    cells = list(cells)

    def found(values: Iterable[Any]) -> str:
        return ", ".join(map(str, sorted(set(values))))

    weights = {cell.weights[:8] for cell in cells}
    return (
        f"Seeds {found(cell.seed for cell in cells)}; {found(cell.rounds for cell in cells)} "
        f"rounds; {found(cell.size for cell in cells)} px; "
        f"{found(cell.model for cell in cells)}; weights "
        f"{found(weights) if len(weights) <= 3 else f'of {len(weights)} kinds'}; torch "
        f"{found(cell.torch for cell in cells)}."
    )


def _left_out(cell: Cell) -> list[str]:
    if cell.method != "afedcl":
        return []
    return [part for part, (option, off) in _PARTS.items() if cell.options.get(option) == off]


def _fields(cell: Cell) -> dict[str, str]:
    """All that cells of one label may differ in, but for the seed."""
    hashes = {"weights": cell.weights[:8], "images": cell.setting.images[:8]}
    rest = {"model": cell.model, "size": cell.size, "rounds": cell.rounds, "torch": cell.torch}
    fields = settings(cell) | msgspec.to_builtins(cell.setting) | rest | hashes
    return {name: str(value) for name, value in fields.items()}


def _bracketed(fields: dict[str, str], differing: Iterable[str]) -> str:
    told = ", ".join(f"{name} {fields[name]}" for name in differing if name in fields)
    return f" ({told})" if told else ""
