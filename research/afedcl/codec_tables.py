"""Tables of accuracy against bytes: methods with and without a codec."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from research.afedcl import labels, scarce_tables
from research.afedcl.cell import Finished
from research.runner import statistics
from research.runner.tables import Table, format_difference, mark_fewer

LEGEND = (
    "Own / all: accuracy % on held-out images, mean over nodes and seeds; own: each node's "
    "images, its own classes being the only candidates; all: all nodes' images, every class "
    "being a candidate. MB: what a node sends and receives in all rounds, the first broadcast "
    "and the result among it, mean over seeds. Differences from the same method without a codec: "
    "points, paired by seed, with 95 % intervals."
)
_ENCODER, _SUMS = 9.1, 6.7  # MB of MobileNetV2 and of its features' sums, as they are

_Rows = Mapping[tuple[str, str], Mapping[int, Finished]]


def tables(finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """What is to be known about the tables, and one for each data set."""
    return [LEGEND], [_table(dataset, rows) for dataset, rows in arrange(finished).items()]


def arrange(finished: Sequence[Finished]) -> dict[str, _Rows]:
    """Results by data set, method and codec, and seed."""
    found: dict[str, dict[tuple[str, str], dict[int, Finished]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for each in sorted(finished, key=lambda each: labels.rank(each.cell.method)):
        cell = each.cell
        found[cell.setting.dataset][cell.method, cell.codec or "none"][cell.seed] = each
    return dict(found)


def megabytes(each: Finished) -> tuple[float, float]:
    """What a node has sent and received."""
    if each.bytes:
        return each.bytes[0] / 1e6, each.bytes[1] / 1e6
    up, _ = scarce_tables.cost(each.cell.method, each.cell.rounds)
    sums = scarce_tables.TIMES_OF_SUMS.get(each.cell.method, 0)
    rounds = sums if each.cell.method == "gaussian" else each.cell.rounds + sums
    # the totals of the last sums are in the result
    return up, (rounds + 1) * _ENCODER + bool(sums) * _SUMS


def mean_megabytes(seeds: Collection[Finished]) -> tuple[float, float]:
    """What a node has sent and received, the mean over seeds."""
    sent, received = zip(*map(megabytes, seeds), strict=True)
    return sum(sent) / len(seeds), sum(received) / len(seeds)


def _table(dataset: str, rows: _Rows) -> Table:
    most = max(map(len, rows.values()))
    made = []
    for (method, codec), seeds in rows.items():
        plain = rows.get((method, "none"), {})
        sent = mean_megabytes(seeds.values())
        whole = sum(mean_megabytes(plain.values())) if plain else 0
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
                f"{labels.METHODS[method]}, {codec}",
                f"{means[0]:.1f} / {means[1]:.1f}{mark_fewer(len(seeds), most)}",
                " / ".join(format_difference(each) for each in worth if each)
                if codec != "none"
                else "",
                " / ".join(f"{each:.1f}" for each in sent),
                f"1/{whole / sum(sent):.1f}" if whole and codec != "none" else "",
            ]
        )
    return Table(
        dataset, ["", "own / all", "difference", "MB sent / received", "of the bytes"], made
    )
