"""Tables: accuracies in three views beside the paper's, paired differences, mean ranks,
trials, changed choices.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from research.afedcl import (
    codec_tables,
    joining_tables,
    labels,
    privacy_tables,
    reported,
    scarce_tables,
)
from research.afedcl.cell import Finished, Metric
from research.afedcl.factors import difference
from research.afedcl.panels import Panel, Series, X, arrange, gaps
from research.runner import statistics
from research.runner.tables import Table, format_difference, format_spread, mark_fewer

NOT_RUN, NOT_STORED = "not run", "not stored"
# in the order of columns
VIEWS: dict[Metric, str] = {"own": "own", "everyone": "all", "accuracy": "paper's view"}
_ALONE = labels.METHODS["local"]
_FACTORS = (
    "Entries: accuracy % on held-out images of the tuning pool, mean ± standard deviation over "
    "seeds of the mean over nodes at the last round, and macro F1 %; below, the difference from "
    "the base, paired by seed, 95 % interval."
)
_LEGEND = (
    "Entries: accuracy % on held-out images, mean ± standard deviation over seeds of the mean "
    "over nodes at the last round. *own*: each node's images, its own classes being the only "
    "candidates. *all*: all nodes' images, every class of the data set being a candidate. "
    "*paper's view*: each node's images, yet every class being a candidate; macro F1 % in "
    "brackets."
)
_FEWER = (
    "[n] marks an entry of n seeds where others have more; a comparison uses the seeds that both "
    "sides have."
)


def make(name: str, finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """What is to be known about an experiment's tables, and the tables."""
    own: dict[str, Callable[[Sequence[Finished]], tuple[list[str], list[Table]]]] = {
        "tune": _tuning,
        "factors": _factors,
        "joining": _joining,
        "scarce": scarce_tables.tables,
        "around": partial(scarce_tables.tables, with_cost=False),
        "trained": partial(scarce_tables.tables, with_cost=False),
        "codecs": codec_tables.tables,
        "private": privacy_tables.tables,
        "private_tune": privacy_tables.tables,
        "private_training": privacy_tables.tables,
    }
    return own.get(name, partial(_comparison, name))(finished)


def _comparison(name: str, finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """Accuracies in each panel, then differences and ranks; and what is to be known about them."""
    panels = arrange(name, finished)
    shown = _as_in_paper(panels) if name == "table2" else panels
    made = [_accuracies(panel, with_paper=name == "table2") for panel in shown]
    for panel in panels:
        alone = [each for each in panel.series if each.method == "local"]
        made += [_differences(panel, 1, each) for each in alone if len(panel.series) > 1]
        made += [_differences(panel, -1, panel.series[-1])] if len(panel.series) > 1 else []
    words = [_LEGEND, *([gaps(panels), _FEWER] if gaps(panels) else [])]
    if name == "table2":
        words.append("Below them what the paper prints.")
        if all(panel.dataset != reported.UNAVAILABLE for panel in panels):
            words.append(f"{reported.UNAVAILABLE} is not run: its images could not be had.")
    if name == "fig4":
        told = " and ".join(f"{value} % for {variant}" for variant, value in reported.FIG_4.items())
        words.append(f"The paper tells {told}, in a setting that it does not state.")
    if over_all := _over_all(panels):
        words.append(over_all[0])
        made.append(over_all[1])
    if gains := joining_tables.gains(finished) if name in ("table2", "joining") else []:
        words.append(joining_tables.GAINS)
        made += gains
    return words, made


def _joining(finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """The comparison on the report pool, then what the rules give on the tuning pool."""
    words, made = _comparison(
        "joining", [each for each in finished if each.cell.setting.pool == "report"]
    )
    tuned = joining_tables.rules([each for each in finished if each.cell.setting.pool == "tuning"])
    told = [
        each for each in (joining_tables.GAINS, joining_tables.RULED) if tuned and each not in words
    ]
    return [*words, *told], [*made, *tuned]


def _factors(finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """What each changed choice is worth, method by method."""
    bases: dict[tuple[str, str, str], Finished] = {}
    found: dict[tuple[str, str], dict[str, dict[str, dict[int, Finished]]]] = {}
    for each in finished:
        cell = each.cell
        place = (cell.setting.dataset, labels.partition(cell))
        base = bases.setdefault((*place, cell.method), each)
        change = difference(msgspec.structs.replace(base.cell, seed=cell.seed), cell) or "base"
        rows = found.setdefault(place, {})
        rows.setdefault(change, {}).setdefault(labels.METHODS[cell.method], {})[cell.seed] = each
    return [_FACTORS], [_changes(", ".join(place), rows) for place, rows in found.items()]


def _changes(title: str, rows: Mapping[str, Mapping[str, Mapping[int, Finished]]]) -> Table:
    methods = list(rows["base"])

    def entry(change: str, method: str) -> str:
        seeds, base = rows[change].get(method, {}), rows["base"][method]
        if not seeds:
            return ""
        text = _entry(seeds.values(), len(base))
        worth = statistics.paired_difference(
            {seed: 100 * each.mean("accuracy") for seed, each in seeds.items()},
            {seed: 100 * each.mean("accuracy") for seed, each in base.items()},
        )
        if change == "base" or worth is None or worth.pairs < 2:
            return text
        return f"{text}\n{format_difference(worth)}"

    return Table(
        title,
        ["change", *methods],
        [[change, *(entry(change, each) for each in methods)] for change in rows],
    )


def _as_in_paper(panels: Sequence[Panel]) -> list[Panel]:
    """All columns of the paper's table and all its methods, also those without a cell."""
    by_place = {(panel.dataset, panel.partition): panel for panel in panels}
    names = {series.name: series.method for panel in panels for series in panel.series}
    names |= {
        labels.METHODS[method]: method
        for method in reported.METHODS
        if method not in names.values()
    }
    names = dict(sorted(names.items(), key=lambda item: labels.rank(item[1])))
    made = []
    for place in [
        (dataset, partition) for dataset in reported.DATASETS for partition in reported.PARTITIONS
    ]:
        title = f"{place[0]}, {labels.PARTITIONS[place[1]]}"
        panel = by_place.pop(place, Panel(*place, title, "images", (), ()))
        entries = {series.name: series.entries for series in panel.series}
        rows = [Series(name, method, entries.get(name, {})) for name, method in names.items()]
        made.append(panel._replace(xs=sorted({*panel.xs, *reported.SAMPLES}), series=rows))
    return made + list(by_place.values())


def _accuracies(panel: Panel, *, with_paper: bool) -> Table:
    def entry(series: Series, x: X, view: Metric) -> str:
        seeds = series.entries.get(x, {})
        ours = _entry(seeds.values(), panel.seeds, view) if seeds else NOT_RUN
        if view != "accuracy" or not with_paper:
            return ours
        printed = reported.TABLE_II.get((panel.dataset, panel.partition, int(x), series.method))
        return f"{ours}\npaper {printed.accuracy:.2f} ({printed.f1:.2f})" if printed else ours

    return _table(panel.title, panel, panel.series, entry)


def _differences(panel: Panel, sign: int, reference: Series) -> Table:
    """Between each other series and the reference: minus it if `sign` is 1."""

    def entry(series: Series, x: X, view: Metric) -> str:
        pair = _by_seed(series, x, view), _by_seed(reference, x, view)
        difference = statistics.paired_difference(*pair[::sign])
        if difference is None:
            return "no pair" if series.entries.get(x) and reference.entries.get(x) else NOT_RUN
        return format_difference(difference) + mark_fewer(difference.pairs, panel.seeds)

    what = f"each minus {reference.name}" if sign == 1 else f"{reference.name} minus each other"
    title = f"{panel.title}: {what}, percentage points, paired by seed, 95 % interval"
    return _table(title, panel, [each for each in panel.series if each is not reference], entry)


def _table(
    title: str, panel: Panel, rows: Sequence[Series], entry: Callable[[Series, X, Metric], str]
) -> Table:
    """A column for each view at each x; of an x that has no cell only the paper's."""
    columns: list[tuple[X, Metric]] = [
        (x, view)
        for x in panel.xs
        for view in VIEWS
        if view == "accuracy" or any(x in each.entries for each in rows)
    ]
    heads = [f"{panel.column(x)}: {VIEWS[view]}" for x, view in columns]
    return Table(
        title,
        ["", *heads],
        [[each.name, *(entry(each, *column) for column in columns)] for each in rows],
    )


class _Block(NamedTuple):
    place: Hashable  # a setting
    seed: int


def _over_all(panels: Sequence[Panel]) -> tuple[str, Table] | None:
    """Means, differences and ranks over all settings and seeds, and what they leave out;
    None for a single method.

    Differences are from training alone, and of the last method from each, if that is the same one
    everywhere. A difference's interval takes settings as blocks, as seeds of one setting have much
    in common; fewer than three settings give none that says anything, and leave the seeds.
    """
    results: dict[str, dict[_Block, Finished]] = defaultdict(dict)
    for panel in panels:
        for series in panel.series:
            for x, seeds in series.entries.items():
                for seed, result in seeds.items():  # a cell may stand in two panels
                    place = (
                        result.cell.setting,
                        result.cell.model,
                        x if panel.across == "lambda" else None,
                    )
                    results[series.name][_Block(place, seed)] = result
    if len(results) < 2:
        return None
    common = set.intersection(*(set(found) for found in results.values()))
    by_setting = len({block.place for block in common}) > 2
    references = {f"minus {_ALONE}": (_ALONE, 1)}
    if len(last := {panel.series[-1].name for panel in panels if panel.series}) == 1:
        references |= {f"{name} minus it": (name, -1) for name in last}
    shown = ("mean", *references, "mean rank, 1 = best")
    rows: dict[str, list[str]] = {name: [name] for name in results}
    for view in VIEWS:
        values = {
            name: {
                block: 100 * each.mean(view)
                for block, each in found.items()
                if not math.isnan(each.mean(view))
            }
            for name, found in results.items()
        }
        ranks = statistics.mean_ranks(values)
        for name, entries in rows.items():
            summary = partial(_summary, values, name, ranks, references.values(), by_setting)
            entries.extend(summary() if ranks.blocks else [NOT_STORED] * len(shown))
    if not ranks.blocks:
        return None
    left_out = f"; {ranks.left_out} more lack a method and are left out" if ranks.left_out else ""
    words = (
        f"The last table is over {ranks.blocks} settings and seeds{left_out}. Its 95 % "
        "intervals take "
    ) + (
        "settings as blocks."
        if by_setting
        else "these as independent, and tell nothing of other settings."
    )
    heads = [f"{view}: {what}" for view in VIEWS.values() for what in shown]
    return words, Table("Over all settings and seeds", ["", *heads], [*rows.values()])


def _summary(
    values: Mapping[str, Mapping[_Block, float]],
    name: str,
    ranks: statistics.Ranks,
    references: Iterable[tuple[str, int]],
    by_setting: bool,
) -> list[str]:
    """Mean, differences from references (minus it if the sign is 1) and mean rank,
    over the blocks that all have.
    """
    common = set.intersection(*(set(each) for each in values.values()))

    def minus(reference: str, sign: int) -> str:
        if reference not in values or name == reference:
            return ""
        pair = [{block: values[each][block] for block in common} for each in (name, reference)][
            ::sign
        ]
        difference = statistics.paired_difference(
            *(map(_mean_over_seeds, pair) if by_setting else pair)
        )
        return format_difference(difference) if difference else ""

    mean = statistics.spread(values[name][block] for block in common).mean
    return [f"{mean:.1f}", *(minus(*each) for each in references), f"{ranks.mean[name]:.2f}"]


def _mean_over_seeds(values: Mapping[_Block, float]) -> dict[Hashable, float]:
    """Of each setting."""
    seeds: dict[Hashable, list[float]] = defaultdict(list)
    for block, value in values.items():
        seeds[block.place].append(value)
    return {place: statistics.spread(found).mean for place, found in seeds.items()}


def _tuning(finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """Of each method: its trials, and the settings of the one with the highest mean accuracy."""
    methods: dict[str, dict[tuple[tuple[str, str], ...], list[Finished]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for each in sorted(finished, key=lambda each: labels.order(each.cell)):
        methods[each.cell.method][tuple(labels.settings(each.cell).items())].append(each)
    rows = []
    for method, trials in methods.items():
        # settings and seeds: a trial that is not finished cannot be the best
        most = max(map(len, trials.values()))
        complete = {
            trial: statistics.spread(_accuracies_of(each))
            for trial, each in trials.items()
            if len(each) == most
        }
        best = max(complete, key=lambda trial: complete[trial].mean)
        varied = [pair for pair in best if len({dict(trial).get(pair[0]) for trial in trials}) > 1]
        told = ", ".join(f"{name} {value}" for name, value in varied) or "nothing varied"
        rows.append(
            [
                labels.METHODS.get(method, method),
                str(len(trials)),
                told,
                f"{complete[best].mean:.1f}",
            ]
        )
    words = [
        (
            "Accuracy %, mean over settings, seeds and nodes of the tuning pool; a trial is a "
            "choice of settings."
        )
    ]
    if len({row[1] for row in rows}) > 1:
        words.append("The methods had different numbers of trials: not yet equal chances.")
    if any(each.cell.setting.pool != "tuning" for each in finished):
        words.append("Some cells are of the report pool, where nothing should be tuned.")
    return words, [Table("Best trials", ["", "trials", "best trial", "accuracy"], rows)]


def _entry(results: Iterable[Finished], planned: int, view: Metric = "accuracy") -> str:
    results = [each for each in results if not math.isnan(each.mean(view))]
    if not results:
        return NOT_STORED
    f1 = statistics.spread(100 * each.mean("f1") for each in results)
    told = f" ({f1.mean:.1f})" if view == "accuracy" else ""
    return (
        f"{format_spread([100 * each.mean(view) for each in results])}{told}"
        f"{mark_fewer(f1.size, planned)}"
    )


def _by_seed(series: Series, x: X, view: Metric) -> Mapping[int, float]:
    means = {seed: 100 * each.mean(view) for seed, each in series.entries.get(x, {}).items()}
    return {seed: mean for seed, mean in means.items() if not math.isnan(mean)}


def _accuracies_of(results: Iterable[Finished]) -> list[float]:
    return [100 * each.mean("accuracy") for each in results]
