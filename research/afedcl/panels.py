"""Panels of tables and figures: finished cells by variant and by the quantity that varies across
a panel.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from research.afedcl import labels, reported
from research.afedcl.cell import Cell, Finished
from research.runner.tables import list_fewer

X = str | int | float
_COLUMNS = {
    "images": "{} images a node",
    "lambda": "lambda {:g}",
    "network": "{}",
    "nodes": "{} nodes",
}
T = TypeVar("T")


class Series(NamedTuple):
    """What a variant reached: by what varies across, then by seed."""

    name: str
    method: str
    entries: Mapping[X, Mapping[int, Finished]]

    @property
    def results(self) -> Iterator[Finished]:
        """All of them."""
        return (result for seeds in self.entries.values() for result in seeds.values())


class Panel(NamedTuple):
    """Cells that are compared with one another.

    The series stand in order, the complete AFedCL last.
    """

    dataset: str
    partition: str  # as in `Setting`, without options
    title: str
    across: str  # what varies across
    xs: Sequence[X]
    series: Sequence[Series]

    def column(self, x: X) -> str:
        """What varies across, at `x`, in words."""
        return _COLUMNS[self.across].format(x)

    @property
    def seeds(self) -> int:
        """The most seeds that an entry has."""
        return max(
            (len(seeds) for each in self.series for seeds in each.entries.values()), default=0
        )


class _View(NamedTuple):
    across: str
    x: Callable[[Cell], X]
    title: Callable[[Cell], str]


def arrange(name: str, finished: Sequence[Finished]) -> list[Panel]:
    """The panels of an experiment, with what is finished."""
    return [panel for view, results in _views(name, finished) for panel in _panels(view, results)]


def last_pairs(finished: Iterable[Finished]) -> tuple[list[float], list[float]]:
    """L_D and A_k of each node that has both, in the last round."""
    histories = [
        node.history
        for each in finished
        for node in each.nodes
        if {"L_D", "A_k"} <= node.history.keys()
    ]
    pairs = [(history["L_D"][-1], history["A_k"][-1]) for history in histories]
    known = [(loss, weight) for loss, weight in pairs if loss is not None and weight is not None]
    return [loss for loss, _ in known], [weight for _, weight in known]


def gaps(panels: Sequence[Panel]) -> str:
    """A sentence on what has fewer seeds than the rest, empty if nothing has."""
    planned = max((panel.seeds for panel in panels), default=0)
    return list_fewer(
        planned,
        {
            f"{series.name} in {panel.title}, {panel.column(x)}": len(series.entries.get(x, ()))
            for panel in panels
            for series in panel.series
            for x in panel.xs
        },
    )


def _views(name: str, finished: Sequence[Finished]) -> list[tuple[_View, Sequence[Finished]]]:
    if name == "fig8":
        view = _View(
            "lambda",
            lambda cell: float(cell.options["lambda"]),
            lambda cell: f"{_place(cell)}, {_images(cell)}",
        )
        return [(view, [each for each in finished if "lambda" in each.cell.options])]
    if name == "fig9":
        # The cell that both halves share has the network and the number of nodes that most cells
        # have.
        model = _most(each.cell.model for each in finished)
        nodes = _most(each.cell.setting.nodes for each in finished)
        backbones = _View(
            "network", lambda cell: cell.model, lambda cell: f"{_place(cell)}, {_images(cell)}"
        )
        sizes = _View(
            "nodes", lambda cell: cell.setting.nodes, lambda cell: f"{_place(cell)}, {_total(cell)}"
        )
        return [
            (backbones, [each for each in finished if each.cell.setting.nodes == nodes]),
            (sizes, [each for each in finished if each.cell.model == model]),
        ]
    return [(_View("images", lambda cell: cell.setting.samples, _place), finished)]


def _panels(view: _View, finished: Sequence[Finished]) -> list[Panel]:
    names = labels.names(
        (each.cell for each in finished), lambda cell: (view.title(cell), view.x(cell))
    )
    finished = sorted(finished, key=lambda each: (labels.order(each.cell), names[each.key]))
    grouped: dict[str, list[Finished]] = defaultdict(list)
    for each in finished:
        grouped[view.title(each.cell)].append(each)
    return [
        _panel(view, names, title, group)
        for title, group in sorted(grouped.items(), key=_as_listed)
    ]


def _panel(
    view: _View, names: Mapping[str, str], title: str, finished: Sequence[Finished]
) -> Panel:
    entries: dict[str, dict[X, dict[int, Finished]]] = defaultdict(lambda: defaultdict(dict))
    methods = {}
    for each in finished:
        entries[name := names[each.key]][view.x(each.cell)][each.cell.seed] = each
        methods[name] = each.cell.method
    xs = sorted({view.x(each.cell) for each in finished})
    series = [Series(name, methods[name], found) for name, found in entries.items()]
    setting = finished[0].cell.setting
    return Panel(
        setting.dataset, setting.partition.partition(",")[0], title, view.across, xs, series
    )


def _as_listed(item: tuple[str, Sequence[Finished]]) -> tuple[int, int, int, str]:
    """Sorts panels like the paper's table."""
    title, (first, *_) = item
    setting = first.cell.setting
    places = zip(
        (setting.dataset, setting.partition),
        (reported.DATASETS, tuple(labels.PARTITIONS)),
        strict=True,
    )
    dataset, partition = (
        known.index(name) if name in known else len(known) for name, known in places
    )
    return dataset, partition, setting.samples, title


def _place(cell: Cell) -> str:
    return f"{cell.setting.dataset}, {labels.partition(cell)}"


def _images(cell: Cell) -> str:
    return f"{cell.setting.samples} images a node"


def _total(cell: Cell) -> str:
    return f"{cell.setting.nodes * cell.setting.samples} images in all"


def _most(values: Iterable[T]) -> T | None:
    return next((value for value, _ in Counter(values).most_common(1)), None)
