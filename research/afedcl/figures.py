"""Figures of the paper (Cui et al., 2024); the last series, the complete AFedCL,
is the reference.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from research.afedcl import codec_tables, labels, reported, scarce_tables
from research.afedcl.cell import Finished, Metric
from research.afedcl.panels import Panel, Series, X, arrange, gaps, last_pairs
from research.runner import statistics, style
from trainer.methods import RECOMMENDED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_T_SNE = "t-SNE of features of held-out images: distances between clusters mean nothing."
_STARS = (
    "Mean over nodes and seeds; a star where a curve comes within a point of its end for good. "
    "Seconds of one core, by python -m benchmarks.rounds_of_methods."
)
_VIEWS: dict[Metric, tuple[str, bool]] = {
    "everyone": ("s", True),
    "accuracy": ("o", False),
    "own": ("o", True),
}  # as drawn
_ENCODER = 9.1  # MB of MobileNetV2, sent each round
# MB of the consensus head's message, by number of directions; 0: all features
_SUMS = {0: 6.7, 256: 0.3}
_ACROSS = {
    "images": "training images a node",
    "lambda": "lambda",
    "network": "network",
    "nodes": "nodes",
}


def draw(name: str, finished: Sequence[Finished]) -> tuple["Figure", str]:
    """An experiment's figure, and its caption."""
    conditions = labels.conditions(each.cell for each in finished)
    if name == "fig7":
        return _features(finished), f"{_T_SNE} {conditions}"
    if name == "scarce":
        return _scarce(finished), f"{_STARS} {conditions}"
    if name == "codecs":
        return _codecs(finished), f"{codec_tables.LEGEND} {conditions}"
    panels = arrange(name, finished)
    figure, words = _COMPARISONS[name](panels)
    return figure, " ".join((words, conditions, gaps(panels)))


def _features(finished: Sequence[Finished]) -> "Figure":
    """Fig. 7: nodes below one another, methods side by side, a colour for each class."""
    found = [
        (each.cell.method, embedding) for each in finished for embedding in each.embeddings or ()
    ]
    methods = sorted({method for method, _ in found}, key=labels.rank)
    nodes = sorted({embedding.node for _, embedding in found})
    classes = sorted({name for _, embedding in found for name in embedding.labels})
    figure, grid = style.grid(len(nodes), len(methods), 1.9, 1.7)
    for method, embedding in found:
        axes = grid[nodes.index(embedding.node), methods.index(method)]
        style.scatter(axes, embedding.points, embedding.labels, classes, size=9)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes, method in zip(grid[0], methods, strict=True):
        axes.set_title(labels.METHODS.get(method, method))
    for axes, node in zip(grid[:, 0], nodes, strict=True):
        axes.set_ylabel(node)
    style.legend(figure, grid)
    return figure


def _curves(panels: Sequence[Panel]) -> tuple["Figure", str]:
    """Fig. 4: L_D and accuracy over rounds, a column for each setting."""
    settings = [(panel, x) for panel in panels for x in panel.xs]
    figure, grid = style.grid(2, len(settings), 4.2, 2.5, sharex=True)
    for (panel, x), (upper, lower) in zip(settings, grid.T, strict=True):
        for number, series in enumerate(panel.series):
            runs = series.entries.get(x, {}).values()
            _band(upper, runs, "L_D", 1, _colour(number, panel), series.name)
            _band(lower, runs, "accuracy", 100, _colour(number, panel), series.name)
        upper.axhline(math.log(2), color="#666666", lw=0.8, ls=":", label="chance, ln 2")
        upper.set(title=f"{panel.title}, {panel.column(x)}", ylabel="discrimination loss L_D")
        upper.set_ylim(bottom=0)
        lower.set(xlabel="round", ylabel="accuracy %")
    style.legend(figure, grid)
    told = " and ".join(f"{value} % for {variant}" for variant, value in reported.FIG_4.items())
    words = "Mean over seeds of the mean over nodes; the band is a standard deviation over seeds."
    return figure, f"{words} The paper tells {told}."


def _regression(panels: Sequence[Panel]) -> tuple["Figure", str]:
    """Fig. 5: the fusion weight over L_D, a point for each node, seed and setting;
    a column for each variant.
    """
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    figure, grid = style.grid(1, len(names), 4.6, 3.8)
    for axes, name in zip(grid[0], names, strict=True):
        variant = {
            panel.title: series
            for panel in panels
            for series in panel.series
            if series.name == name
        }
        for number, (title, series) in enumerate(variant.items()):
            x, y = last_pairs(series.results)
            axes.scatter(
                x,
                y,
                s=22,
                color=style.COLOURS[number % 7],
                marker=style.MARKERS[number % 8],
                label=title,
            )
        x, y = last_pairs(result for series in variant.values() for result in series.results)
        told = name
        if fit := statistics.regress(x, y):
            ends = np.array([min(x), max(x)])
            axes.plot(
                ends,
                fit.intercept + fit.slope * ends,
                color=style.REFERENCE,
                label="regression line",
            )
            told = f"{name}\nslope {fit.slope:.3f} ± {fit.half:.3f}, {len(x)} points"
        axes.set(
            title=told,
            xlabel="discrimination loss L_D",
            ylabel="fusion weight A_k of the global features",
        )
    style.legend(figure, grid)
    return (
        figure,
        (
            "A point is a node after the last round; the slope's 95 % interval takes points as "
            "independent."
        ),
    )


def _lambdas(panels: Sequence[Panel]) -> tuple["Figure", str]:
    """Fig. 8: accuracy over lambda."""
    figure, grid = _row(panels, 4.2)
    for axes, panel in zip(grid[0], panels, strict=True):
        for number, series in enumerate(panel.series):
            xs = [x for x in panel.xs if x in series.entries]
            means, deviations = _spreads(series, xs)
            options = {
                "color": _colour(number, panel),
                "marker": style.MARKERS[number % 8],
                "capsize": 3,
                "label": series.name,
            }
            axes.errorbar(xs, means, deviations, **options)
        axes.set_xscale("log")
        axes.set_xticks(panel.xs, [f"{x:g}" for x in panel.xs])
        axes.minorticks_off()
        axes.set(title=panel.title, xlabel="lambda", ylabel="accuracy %")
    style.legend(figure, grid)
    return figure, "Mean over seeds; bars are a standard deviation over seeds."


def _bars(panels: Sequence[Panel]) -> tuple["Figure", str]:
    """Figs. 9 and 10: groups of bars."""
    most = max(len(panel.xs) * len(panel.series) for panel in panels)
    figure, grid = _row(panels, max(3.6, 0.42 * most))
    for axes, panel in zip(grid[0], panels, strict=True):
        width = 0.84 / len(panel.series)
        for number, series in enumerate(panel.series):
            at = [place for place, x in enumerate(panel.xs) if x in series.entries]
            means, deviations = _spreads(series, [panel.xs[place] for place in at])
            left = [place + (number - (len(panel.series) - 1) / 2) * width for place in at]
            style.bars(axes, left, means, deviations, width, _colour(number, panel), series.name)
        axes.set_xticks(range(len(panel.xs)), map(str, panel.xs))
        axes.grid(axis="x", visible=False)
        axes.set(
            title=panel.title, xlabel=_ACROSS[panel.across], ylabel="accuracy %", ylim=(0, 105)
        )
    style.legend(figure, grid)
    return figure, "Mean over seeds; bars are a standard deviation over seeds."


def _table2(panels: Sequence[Panel]) -> tuple["Figure", str]:
    """Table II: a panel for each setting that was run, a line for each method."""
    settings = [(panel, x) for panel in panels for x in panel.xs]
    across = min(3, len(settings))
    rows = max(len(panel.series) for panel in panels)
    figure, grid = style.grid(
        math.ceil(len(settings) / across), across, 3.6, 0.8 + 0.26 * rows, sharex=True
    )
    for axes in grid.flat[len(settings) :]:
        axes.set_visible(False)
    for axes, (panel, x) in zip(grid.flat, settings, strict=False):
        for number, series in enumerate(panel.series):
            height = len(panel.series) - number
            colour = style.REFERENCE if number == len(panel.series) - 1 else style.COLOURS[0]
            for view, (marker, fill) in _VIEWS.items() if x in series.entries else ():
                means, deviations = _spreads(series, [x], view)
                options = {
                    "color": colour,
                    "mfc": colour if fill else "white",
                    "capsize": 3,
                    "ms": 6,
                }
                axes.errorbar(means, [height], xerr=deviations, fmt=marker, **options)
            if printed := reported.TABLE_II.get(
                (panel.dataset, panel.partition, int(x), series.method)
            ):
                axes.plot(printed.accuracy, height, "D", mfc="none", mec="#777777", ms=5)
        axes.set_yticks(range(len(panel.series), 0, -1), [series.name for series in panel.series])
        axes.set(title=f"{panel.title}, {panel.column(x)}", xlabel="accuracy %")
        axes.xaxis.set_tick_params(labelbottom=True)
    words = (
        "Means over seeds, bars a standard deviation. Filled dots: own classes; filled squares: "
        "all classes and nodes; hollow dots: the paper's view; hollow diamonds: the paper's "
        "numbers."
    )
    return figure, words


def _consensus(panels: Sequence[Panel]) -> tuple["Figure", str]:
    """Accuracy over what a node sends: own classes above, all below, a column for each data set."""
    figure, grid = style.grid(2, len(panels), 4.4, 2.8, sharex=True)
    methods = list(dict.fromkeys(series.method for panel in panels for series in panel.series))
    for panel, column in zip(panels, grid.T, strict=True):
        views: tuple[Metric, ...] = ("own", "everyone")
        for axes, view in zip(column, views, strict=True):
            for series in panel.series:
                if series.method == "local":
                    mean = statistics.spread(100 * each.mean(view) for each in series.results).mean
                    axes.axhline(
                        mean, color="#666666", lw=1, ls=":", label=f"{series.name}, sends nothing"
                    )
                    continue
                sent, means, deviations = _over_bytes(series, view)
                options = {
                    "color": style.REFERENCE
                    if series.method == "gaussian"
                    else style.COLOURS[methods.index(series.method) % 7],
                    "fmt": "*-"
                    if series.method == "gaussian"
                    else "s"
                    if "+" in series.name
                    else "o-",
                    "ms": 11 if series.method == "gaussian" else 5,
                }
                axes.errorbar(
                    sent, means, deviations, capsize=2, lw=1, label=series.name, **options
                )
        column[0].set_title(f"{panel.title}, {panel.column(panel.xs[0])}")
        column[0].set_ylabel("own classes, accuracy %")
        column[1].set(
            xlabel="MB that a node sends, all rounds",
            ylabel="all classes, accuracy %",
            xscale="log",
        )
    style.legend(figure, grid)
    return (
        figure,
        (
            "Mean over seeds, bars a standard deviation. Among all classes models were judged "
            "after the last round."
        ),
    )


def _over_bytes(series: Series, view: Metric) -> tuple[list[float], list[float], list[float]]:
    """MB sent, means and deviations in percent:
    of own classes in all rounds that were judged, else of the last one.
    """
    results = list(series.results)
    cell = results[0].cell
    sums = (
        _SUMS[int(cell.options.get("dimensions", 0))]
        if cell.head or cell.method == "gaussian"
        else 0.0
    )
    rounds = [cell.rounds]
    runs = np.array([[100 * each.mean(view)] for each in results])
    if view == "own" and not sums:
        histories = np.array(
            [[node.history["accuracy"] for node in each.nodes] for each in results], float
        ).mean(1)
        rounds = [int(place) + 1 for place in np.flatnonzero(~np.isnan(histories).any(0))]
        runs = 100 * histories[:, [place - 1 for place in rounds]]
    sent = [sums + (round_ * _ENCODER if cell.method != "gaussian" else 0) for round_ in rounds]
    found = [statistics.spread(run) for run in runs.T]
    return (
        sent,
        [each.mean for each in found],
        [0.0 if each.size == 1 else each.deviation for each in found],
    )


def _scarce(finished: Sequence[Finished]) -> "Figure":
    """Accuracy over what training costs a node,
    a column for each setting in which all methods' rounds were judged.
    """
    curves = scarce_tables.curves(each for each in finished if not each.cell.pooled)
    judged = {
        place
        for (variant, place), curve in curves.items()
        if variant == RECOMMENDED and len(curve) > 1
    }
    places = sorted(judged, key=scarce_tables.Place.order)
    methods = sorted({variant for variant, place in curves if place in judged}, key=labels.rank)
    colours = {"local": "#666666", RECOMMENDED: style.REFERENCE}
    colours |= dict(
        zip((each for each in methods if each not in colours), style.COLOURS, strict=False)
    )
    figure, grid = style.grid(2, max(1, len(places)), 4.6, 2.9)
    for place, column in zip(places, grid.T, strict=False):
        for method in methods:
            curve = curves.get((method, place), {})
            costs = [scarce_tables.cost(method, round_) for round_ in curve]
            for axes, paid in zip(column, zip(*costs, strict=True), strict=False):
                if not any(paid):
                    axes.axhline(
                        curve[max(curve)],
                        color=colours[method],
                        lw=1,
                        ls=":",
                        label=labels.METHODS[method],
                    )
                    continue
                axes.plot(
                    paid,
                    curve.values(),
                    "o-",
                    ms=3,
                    lw=1,
                    color=colours[method],
                    label=labels.METHODS[method],
                )
                if len(curve) > 1:
                    settled = [*curve].index(scarce_tables.settles(curve))
                    axes.plot(
                        paid[settled], [*curve.values()][settled], "*", ms=11, color=colours[method]
                    )
        column[0].set_title(str(place))
        column[0].set(
            xlabel="MB that a node has sent", ylabel="own classes, accuracy %", xscale="log"
        )
        column[1].set(
            xlabel="seconds that it has computed", ylabel="own classes, accuracy %", xscale="log"
        )
    style.legend(figure, grid)
    return figure


def _codecs(finished: Sequence[Finished]) -> "Figure":
    """Accuracy over bytes, a line for each method from its coarsest codec to none,
    a column for each data set.
    """
    results = codec_tables.arrange(finished)
    figure, grid = style.grid(2, len(results), 4.6, 2.9, sharex=True)
    for (dataset, rows), column in zip(results.items(), grid.T, strict=True):
        methods = list(dict.fromkeys(method for method, _ in rows))
        for axes, view in zip(column, scarce_tables.VIEWS, strict=True):
            for number, method in enumerate(methods):
                found = [seeds for (each, _), seeds in rows.items() if each == method]
                points = sorted(
                    (
                        sum(codec_tables.mean_megabytes(seeds.values())),
                        statistics.spread(scarce_tables.reached(seeds, view).values()).mean,
                        next(iter(seeds.values())).cell.codec or "none",
                    )
                    for seeds in found
                )
                colour = style.REFERENCE if method == RECOMMENDED else style.COLOURS[number]
                xs, ys, names = zip(*points, strict=True)
                axes.plot(xs, ys, "o-", ms=4, lw=1, color=colour, label=labels.METHODS[method])
                for x, y, codec in zip(xs, ys, names, strict=True):
                    axes.annotate(
                        codec, (x, y), (0, 4), textcoords="offset points", fontsize=7, ha="center"
                    )
        column[0].set(title=dataset, ylabel="own classes, accuracy %")
        column[1].set(
            xlabel="MB that a node has sent and received",
            ylabel="all classes, accuracy %",
            xscale="log",
        )
    style.legend(figure, grid)
    return figure


_Drawer = Callable[[Sequence[Panel]], tuple["Figure", str]]  # and what it shows, in words
_COMPARISONS: dict[str, _Drawer] = {
    "table2": _table2,
    "fig4": _curves,
    "fig5": _regression,
    "fig8": _lambdas,
    "fig9": _bars,
    "fig10": _bars,
    "consensus": _consensus,
}
DRAWN = {*_COMPARISONS, "codecs", "fig7", "scarce"}


def _band(
    axes: "Axes", results: Iterable[Finished], metric: str, scale: float, colour: str, label: str
) -> None:
    """Mean over seeds of the mean over nodes, in the rounds that all of them measured."""
    runs = [
        [node.history[metric] for node in each.nodes if metric in node.history] for each in results
    ]
    values = np.array([np.mean(np.array(run, float), axis=0) for run in runs if run]) * scale
    if not values.size:
        return
    rounds = np.flatnonzero(~np.isnan(values).any(axis=0))
    style.band(axes, rounds + 1, values[:, rounds], colour, label)


def _spreads(
    series: Series, xs: Iterable[X], view: Metric = "accuracy"
) -> tuple[list[float], list[float]]:
    """Means and deviations in percent; a single seed has no deviation."""
    found = [
        statistics.spread(100 * each.mean(view) for each in series.entries[x].values()) for x in xs
    ]
    return [each.mean for each in found], [
        0.0 if each.size == 1 else each.deviation for each in found
    ]


def _colour(number: int, panel: Panel) -> str:
    return (
        style.REFERENCE
        if number == len(panel.series) - 1
        else style.COLOURS[number % len(style.COLOURS)]
    )


def _row(panels: Sequence[Panel], width: float) -> tuple["Figure", Any]:
    return style.grid(1, len(panels), width, 3.2)
