"""Tables of accuracy against epsilon: what differential privacy of each image takes from a
method.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from research.afedcl import labels, scarce_tables
from research.afedcl.cell import Cell, Finished
from research.runner import statistics
from research.runner.tables import Table, format_difference, mark_fewer

LEGEND = (
    "Own / all: accuracy % on held-out images, mean over nodes and seeds; own: each node's "
    "images, its own classes being the only candidates; all: all nodes' images, every class "
    "being a candidate. Epsilon: of each training image at a node that takes part in all rounds, "
    "delta 1e-5. Differences from the same method and images without noise: points, paired by "
    "seed, with 95 % intervals."
)
_NONE = "none"

_Rows = Mapping[tuple[str, int, str], Mapping[int, Finished]]


def tables(finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """What is to be known about the tables, and one for each data set."""
    return [LEGEND], [_table(dataset, rows) for dataset, rows in arrange(finished).items()]


def arrange(finished: Sequence[Finished]) -> dict[str, _Rows]:
    """Results by data set, then by method, images a node and epsilon, and by seed."""
    found: dict[str, dict[tuple[str, int, str], dict[int, Finished]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for each in sorted(
        finished, key=lambda each: (labels.rank(each.cell.method), each.cell.setting.samples)
    ):
        cell = each.cell
        found[cell.setting.dataset][_variant(cell), cell.setting.samples, _epsilon(cell)][
            cell.seed
        ] = each
    return dict(found)


def _variant(cell: Cell) -> str:
    """The method, and how a private one trains where trials differ in it."""
    name = labels.METHODS[cell.method]
    if cell.setting.pool == "report" or not cell.privacy or cell.method == "gaussian":
        return name
    return f"{name}, {cell.rounds} steps of {cell.training.learning_rate:g}"


def _epsilon(cell: Cell) -> str:
    return cell.privacy["epsilon"] if cell.privacy else _NONE


def _table(dataset: str, rows: _Rows) -> Table:
    most = max(map(len, rows.values()))
    made = []
    for (method, samples, epsilon), seeds in rows.items():
        plain = rows.get((method, samples, _NONE), {})
        means = [
            statistics.spread(scarce_tables.reached(seeds, view).values()).mean
            for view in scarce_tables.VIEWS
        ]
        worth = [
            statistics.paired_difference(
                scarce_tables.reached(seeds, view), scarce_tables.reached(plain, view)
            )
            for view in scarce_tables.VIEWS
        ]
        made.append(
            [
                method,
                str(samples),
                epsilon,
                f"{means[0]:.1f} / {means[1]:.1f}{mark_fewer(len(seeds), most)}",
                " / ".join(format_difference(each) for each in worth if each)
                if epsilon != _NONE
                else "",
            ]
        )
    return Table(dataset, ["", "images a node", "epsilon", "own / all", "difference"], made)
