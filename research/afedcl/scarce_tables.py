"""Tables of which method suits plants with few images: every setting,
and paired differences over settings.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from research.afedcl import labels
from research.afedcl.cell import Cell, Finished, Metric, Setting
from research.runner import statistics
from research.runner.tables import Table, format_difference, mark_fewer
from trainer.methods import RECOMMENDED

POOLED = "one place"
VIEWS: tuple[Metric, Metric] = ("own", "everyone")
LEGEND = (
    "Entries: own / all, accuracy % on held-out images, mean over nodes and seeds at the last "
    "round; own: each node's images, its own classes being the only candidates; all: all nodes' "
    f"images, every class being a candidate. *{POOLED}*: all nodes' training images pooled and "
    "trained on as long, for comparison. Differences are percentage points, means over settings "
    "of means over the seeds that both have, with 95 % intervals whose blocks are the settings; "
    "in brackets the setting in which the difference is least."
)
_SUMS, _ROUND = (
    (6.7, 0.2),
    (9.1, 0.33),
)  # MB that a node sends and seconds that it computes: MobileNetV2's sums; a round
# By method: rounds of sums, seconds of a round of training where these differ (python -m
# benchmarks.rounds_of_methods).
TIMES_OF_SUMS = {"gaussian": 1, RECOMMENDED: 2}
_SECONDS = {"fedrep": 0.24, "fedala": 0.36, "afedcl": 0.44, RECOMMENDED: 0.36}

_USUAL_NODES, _USUAL_SIZE, _USUAL_MODEL = 5, 64, "mobilenet_v2"  # what a row's name leaves out


class Place(NamedTuple):
    """Where methods are compared: a row of the tables."""

    setting: Setting
    size: int  # pixels
    model: str

    @staticmethod
    def of(cell: Cell) -> "Place":
        """Where a cell stands."""
        return Place(cell.setting, cell.size, cell.model)

    def __str__(self) -> str:
        setting = self.setting
        partition = labels.PARTITIONS.get(setting.partition, setting.partition)
        classes = f", {setting.classes_per_node} classes" if setting.partition == "disjoint" else ""
        nodes = f", {setting.nodes} plants" if setting.nodes != _USUAL_NODES else ""
        size = f", {self.size} px" if self.size != _USUAL_SIZE else ""
        model = f", {self.model}" if self.model != _USUAL_MODEL else ""
        return (
            f"{setting.dataset}, {setting.samples} images, {partition}{classes}{nodes}{size}{model}"
        )

    def order(self) -> tuple[str, str, int, int, int, int, str]:
        """Sorts rows."""
        of = self.setting
        return (
            of.dataset,
            of.partition,
            of.classes_per_node,
            of.samples,
            of.nodes,
            self.size,
            self.model,
        )


_Results = Mapping[Place, Mapping[int, Finished]]


def tables(
    finished: Sequence[Finished], *, with_cost: bool = True
) -> tuple[list[str], list[Table]]:
    """What is to be known about the tables, and the tables: accuracies, differences and,
    if wanted, cost.
    """
    results = by_variant(finished)
    seeds = max(len(each) for settings in results.values() for each in settings.values())
    words = [
        LEGEND,
        f"[n] marks an entry of n seeds where others have {seeds}; an empty one is not run.",
    ]
    made = [_accuracies(results, seeds)]
    if RECOMMENDED in results:
        made.append(_differences(results, RECOMMENDED))
    if with_cost:
        made.append(_cost(finished))
    return words, made


def by_variant(finished: Iterable[Finished]) -> dict[str, _Results]:
    """Results by method (or POOLED), place and seed;
    of runs that differ in rounds alone the longest.
    """
    found: dict[str, dict[Place, dict[int, Finished]]] = defaultdict(lambda: defaultdict(dict))
    for each in sorted(finished, key=lambda each: (labels.order(each.cell), each.cell.rounds)):
        found[_variant(each)][Place.of(each.cell)][each.cell.seed] = each
    pooled = found.pop(POOLED, None)
    return {**found, **({POOLED: pooled} if pooled else {})}


def name(variant: str) -> str:
    """A variant's name in tables."""
    return labels.METHODS.get(variant, variant)


def reached(results: Mapping[int, Finished], view: Metric) -> dict[int, float]:
    """Accuracy in percent, by seed."""
    return {seed: 100 * each.mean(view) for seed, each in results.items()}


def curves(finished: Iterable[Finished]) -> dict[tuple[str, Place], dict[int, float]]:
    """Accuracy among own classes in percent, mean over nodes and seeds,
    by variant and place, after so many rounds.

    Where sums make the classifier after training, runs of different length tell it; else each run's
    history.
    """
    found: dict[tuple[str, Place], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in finished:
        curve = found[_variant(each), Place.of(each.cell)]
        if each.cell.method in TIMES_OF_SUMS:
            curve[each.cell.rounds].append(100 * each.mean("own"))
            continue
        histories = [node.history["accuracy"] for node in each.nodes if "accuracy" in node.history]
        for round_, values in enumerate(zip(*histories, strict=True), 1):
            if None not in values:
                curve[round_].append(100 * float(np.mean(np.array(values, float))))
    return {
        key: {round_: float(np.mean(values)) for round_, values in sorted(curve.items())}
        for key, curve in found.items()
        if curve
    }


def settles(curve: Mapping[int, float]) -> int:
    """The first round from which on a curve is within a point of its end, or above it."""
    end = curve[max(curve)]
    late = [round_ for round_, value in curve.items() if value < end - 1]
    return min(round_ for round_ in curve if round_ > max(late, default=0))


def cost(variant: str, rounds: int) -> tuple[float, float]:
    """MB that a node of five images has sent, and seconds that it has computed,
    after so many rounds of training.
    """
    sums = TIMES_OF_SUMS.get(variant, 0)
    trained = 0 if variant == "gaussian" else rounds
    megabytes = 0.0 if variant in ("local", POOLED) else sums * _SUMS[0] + trained * _ROUND[0]
    return megabytes, sums * _SUMS[1] + trained * _SECONDS.get(variant, _ROUND[1])


def _variant(each: Finished) -> str:
    return POOLED if each.cell.pooled else each.cell.method


def _accuracies(results: Mapping[str, _Results], seeds: int) -> Table:
    places = sorted({place for each in results.values() for place in each}, key=Place.order)

    def entry(found: Mapping[int, Finished]) -> str:
        means = [statistics.spread(reached(found, view).values()).mean for view in VIEWS]
        return f"{means[0]:.1f} / {means[1]:.1f}{mark_fewer(len(found), seeds)}"

    rows = [
        [str(place), *(entry(each[place]) if place in each else "" for each in results.values())]
        for place in places
    ]
    return Table("Accuracy in every setting, own / all, %", ["", *map(name, results)], rows)


def _differences(results: Mapping[str, _Results], reference: str) -> Table:
    rows = []
    for variant, places in results.items():
        if variant == reference:
            continue
        common = {
            place: {
                seed: (results[reference][place][seed], other)
                for seed, other in seeds.items()
                if seed in results[reference].get(place, {})
            }
            for place, seeds in places.items()
        }
        common = {place: pairs for place, pairs in common.items() if pairs}
        if not common:
            continue
        row = [name(variant), str(len(common))]
        for view in VIEWS:
            sides: tuple[dict[Hashable, float], dict[Hashable, float]] = tuple(
                {
                    place: float(np.mean([100 * pair[side].mean(view) for pair in pairs.values()]))
                    for place, pairs in common.items()
                }
                for side in (0, 1)
            )  # type: ignore[assignment]
            difference = statistics.paired_difference(*sides)
            assert difference is not None
            worst = min(common, key=lambda place: sides[0][place] - sides[1][place])
            least = sides[0][worst] - sides[1][worst]
            row.append(f"{format_difference(difference)} [{least:+.1f}: {worst}]")
        rows.append(row)
    return Table(f"{name(reference)} minus each other", ["", "settings", "own", "all"], rows)


def _cost(finished: Sequence[Finished]) -> Table:
    """Until own accuracy is within a point of its end, mean over the settings that all have."""
    found = {key: curve for key, curve in curves(finished).items() if len(curve) > 1}
    variants = list(dict.fromkeys(variant for variant, _ in found))
    common = set.intersection(
        *({place for each, place in found if each == variant} for variant in variants)
    )
    rows = []
    for variant in sorted(variants, key=labels.rank) if common else []:
        rounds = float(np.mean([settles(found[variant, place]) for place in common]))
        rows.append(
            [
                name(variant),
                f"{rounds:.0f}",
                *(f"{each:.0f}" for each in cost(variant, round(rounds))),
            ]
        )
    heads = [
        "",
        "rounds until within a point of the end, own",
        "MB that a node has sent",
        "seconds that it has computed",
    ]
    where = "; ".join(map(str, sorted(common, key=Place.order)))
    return Table(f"What training costs ({where})", heads, rows)
