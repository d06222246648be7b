"""Tables: accuracies beside the paper's, paired differences, mean ranks, trials, changed choices."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from research.afedcl import labels, reported
from research.afedcl.cell import Finished
from research.afedcl.factors import difference
from research.afedcl.panels import Panel, Series, X, arrange, gaps
from research.runner import statistics
from research.runner.tables import Table, format_difference, format_spread, mark_fewer

NOT_RUN = "not run"
_FACTORS = (
    "Entries: accuracy % on held-out images of the tuning pool, mean ± standard deviation over seeds of the mean over "
    "nodes at the last round, and macro F1 %; below, the difference from the base, paired by seed, 95 % interval."
)
_LEGEND = (
    "Entries: accuracy % on held-out images, mean ± standard deviation over seeds of the mean over nodes at the last "
    "round; macro F1 % in brackets."
)
_FEWER = "[n] marks an entry of n seeds where others have more; a comparison uses the seeds that both sides have."


def make(name: str, finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """What is to be known about an experiment's tables, and the tables."""
    return {"tune": _tuning, "factors": _factors}.get(name, partial(_comparison, name))(finished)


def _comparison(name: str, finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """Accuracies in each panel, then differences and ranks; and what is to be known about them."""
    panels = arrange(name, finished)
    shown = _as_in_paper(panels) if name == "table2" else panels
    made = [_accuracies(panel, with_paper=name == "table2") for panel in shown]
    made += [_differences(panel) for panel in panels if len(panel.series) > 1]
    words = [_LEGEND, *([gaps(panels), _FEWER] if gaps(panels) else [])]
    if name == "table2":
        words.append("Below them what the paper prints.")
        if all(panel.dataset != reported.UNAVAILABLE for panel in panels):
            words.append(f"{reported.UNAVAILABLE} is not run: its images could not be had.")
    if name == "fig4":
        told = " and ".join(f"{value} % for {variant}" for variant, value in reported.FIG_4.items())
        words.append(f"The paper tells {told}, in a setting that it does not state.")
    if ranked := _ranks(panels):
        words.append(ranked[0])
        made.append(ranked[1])
    return words, made


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

    return Table(title, ["change", *methods], [[change, *(entry(change, each) for each in methods)] for change in rows])


def _as_in_paper(panels: Sequence[Panel]) -> list[Panel]:
    """All columns of the paper's table and all its methods, also those without a cell."""
    by_place = {(panel.dataset, panel.partition): panel for panel in panels}
    names = {series.name: series.method for panel in panels for series in panel.series}
    names |= {labels.METHODS[method]: method for method in reported.METHODS if method not in names.values()}
    names = dict(sorted(names.items(), key=lambda item: labels.rank(item[1])))
    made = []
    for place in [(dataset, partition) for dataset in reported.DATASETS for partition in reported.PARTITIONS]:
        title = f"{place[0]}, {labels.PARTITIONS[place[1]]}"
        panel = by_place.pop(place, Panel(*place, title, "images", (), ()))
        entries = {series.name: series.entries for series in panel.series}
        rows = [Series(name, method, entries.get(name, {})) for name, method in names.items()]
        made.append(panel._replace(xs=sorted({*panel.xs, *reported.SAMPLES}), series=rows))
    return made + list(by_place.values())


def _accuracies(panel: Panel, *, with_paper: bool) -> Table:
    def entry(series: Series, x: X) -> str:
        seeds = series.entries.get(x, {})
        ours = _entry(seeds.values(), panel.seeds) if seeds else NOT_RUN
        printed = reported.TABLE_II.get((panel.dataset, panel.partition, int(x), series.method)) if with_paper else None
        return f"{ours}\npaper {printed.accuracy:.2f} ({printed.f1:.2f})" if printed else ours

    return _table(panel.title, panel, panel.series, entry)


def _differences(panel: Panel) -> Table:
    *others, reference = panel.series

    def entry(series: Series, x: X) -> str:
        difference = statistics.paired_difference(_by_seed(reference, x), _by_seed(series, x))
        if difference is None:
            return "no pair"
        return format_difference(difference) + mark_fewer(difference.pairs, panel.seeds)

    title = f"{panel.title}: {reference.name} minus each other, percentage points, paired by seed, 95 % interval"
    return _table(title, panel, others, entry)


def _table(title: str, panel: Panel, rows: Sequence[Series], entry: Callable[[Series, X], str]) -> Table:
    columns = ["", *(panel.column(x) for x in panel.xs)]
    return Table(title, columns, [[series.name, *(entry(series, x) for x in panel.xs)] for series in rows])


def _ranks(panels: Sequence[Panel]) -> tuple[str, Table] | None:
    """Over all settings and seeds, and what it leaves out; None if there is nothing to rank."""
    values: dict[str, dict[Hashable, float]] = defaultdict(dict)
    for panel in panels:
        for series in panel.series:
            for x, seeds in series.entries.items():
                for seed, result in seeds.items():  # a cell may stand in two panels
                    block = (result.cell.setting, result.cell.model, x if panel.across == "lambda" else None, seed)
                    values[series.name][block] = result.mean("accuracy")
    if len(values) < 2 or not (ranks := statistics.mean_ranks(values)).blocks:
        return None
    left_out = f"; {ranks.left_out} more lack a method and are left out" if ranks.left_out else ""
    words = f"Mean ranks are over {ranks.blocks} settings and seeds{left_out}."
    return words, Table(
        "Mean rank, 1 = best", ["", "mean rank"], [[name, f"{x:.2f}"] for name, x in ranks.mean.items()]
    )


def _tuning(finished: Sequence[Finished]) -> tuple[list[str], list[Table]]:
    """Of each method: its trials, and the settings of the one with the highest mean accuracy."""
    methods: dict[str, dict[tuple[tuple[str, str], ...], list[Finished]]] = defaultdict(lambda: defaultdict(list))
    for each in sorted(finished, key=lambda each: labels.order(each.cell)):
        methods[each.cell.method][tuple(labels.settings(each.cell).items())].append(each)
    rows = []
    for method, trials in methods.items():
        most = max(map(len, trials.values()))  # settings and seeds: a trial that is not finished cannot be the best
        complete = {
            trial: statistics.spread(_accuracies_of(each)) for trial, each in trials.items() if len(each) == most
        }
        best = max(complete, key=lambda trial: complete[trial].mean)
        varied = [pair for pair in best if len({dict(trial).get(pair[0]) for trial in trials}) > 1]
        told = ", ".join(f"{name} {value}" for name, value in varied) or "nothing varied"
        rows.append([labels.METHODS.get(method, method), str(len(trials)), told, f"{complete[best].mean:.1f}"])
    words = ["Accuracy %, mean over settings, seeds and nodes of the tuning pool; a trial is a choice of settings."]
    if len({row[1] for row in rows}) > 1:
        words.append("The methods had different numbers of trials: not yet equal chances.")
    if any(each.cell.setting.pool != "tuning" for each in finished):
        words.append("Some cells are of the report pool, where nothing should be tuned.")
    return words, [Table("Best trials", ["", "trials", "best trial", "accuracy"], rows)]


def _entry(results: Iterable[Finished], planned: int) -> str:
    results = list(results)
    f1 = statistics.spread(100 * each.mean("f1") for each in results)
    return f"{format_spread(_accuracies_of(results))} ({f1.mean:.1f}){mark_fewer(f1.size, planned)}"


def _by_seed(series: Series, x: X) -> Mapping[int, float]:
    return {seed: 100 * each.mean("accuracy") for seed, each in series.entries.get(x, {}).items()}


def _accuracies_of(results: Iterable[Finished]) -> list[float]:
    return [100 * each.mean("accuracy") for each in results]
