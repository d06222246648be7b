"""Figures 6 to 10 of the paper (Peng et al., 2022)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from research.fedtfi import tables
from research.fedtfi.cell import Embedding, Finished, Point
from research.fedtfi.data import DATASETS
from research.fedtfi.variants import FRAMEWORKS
from research.runner import statistics, style
from research.runner.panels import Panel, shown_variants
from research.runner.tables import list_fewer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OWN = ("FedTFI", "MusTEN")  # with which the others are compared
_SPREAD = "Mean over seeds; {} a standard deviation over seeds."
Measure = Callable[[Point], float]
_LOSS: Mapping[str, Measure] = {"training loss": lambda point: point.loss}
_ACCURACY: Mapping[str, Measure] = {"accuracy %": lambda point: 100 * point.accuracy}
_RANKS: Mapping[str, Measure] = {
    "F1 %": lambda point: 100 * point.f1,
    "AUC %": lambda point: 100 * point.auc,
}


def draw(name: str, panels: Sequence[Panel[Finished]]) -> tuple["Figure", str]:
    """An experiment's figure, and its caption."""
    figure, words = DRAWN[name](panels)
    conditions = tables.conditions([each.cell for panel in panels for each in panel.results])
    return figure, " ".join([words, conditions, _gaps(panels)])


def _learning(panels: Sequence[Panel[Finished]]) -> tuple["Figure", str]:
    """Fig. 6: accuracy and training loss over rounds, a column for each data set,
    a curve for each framework.
    """
    figure, grid = style.grid(2, len(panels), 4.6, 2.7, sharex="col")
    colours = _colours(panels)
    for panel, (upper, lower) in zip(panels, grid.T, strict=True):
        for variant, seeds in panel.variants.items():
            _curve(upper, seeds.values(), _ACCURACY["accuracy %"], colours[variant], variant)
            _curve(lower, seeds.values(), _LOSS["training loss"], colours[variant], variant)
        upper.set(title=_title(panel), ylabel="accuracy %")
        lower.set(xlabel="round", ylabel="training loss")
        lower.set_ylim(bottom=0)
    style.legend(figure, grid)
    return figure, f"Shared model on all nodes' held-out images. {_SPREAD.format('the band is')}"


def _ranking(panels: Sequence[Panel[Finished]]) -> tuple["Figure", str]:
    """Fig. 7: F1 and AUC, below them training loss, over rounds;
    a column for each framework, the same axes for all.
    """
    names = shown_variants(panels)
    figure, grid = style.grid(2 * len(panels), len(names), 2.3, 2.2, sharex="col", sharey="row")
    for panel, (upper, lower) in zip(panels, zip(grid[::2], grid[1::2], strict=True), strict=True):
        for place, variant in enumerate(names):
            seeds = panel.variants.get(variant, {}).values()
            for axes, measures, first in (
                (upper[place], _RANKS, 0),
                (lower[place], _LOSS, len(_RANKS)),
            ):
                for number, (label, measure) in enumerate(measures.items(), first):
                    _curve(axes, seeds, measure, _LINES[number], label)
        upper[0].set(ylabel=f"{DATASETS[panel.data].title}\nF1, AUC %", ylim=(0, 102))
        lower[0].set_ylabel("training loss")
        lower[0].set_ylim(bottom=0)
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name)
    for axes in grid[-1]:
        axes.set_xlabel("round")
    style.legend(figure, grid)
    return (
        figure,
        f"Shared model on all nodes' held-out images, macro means. {_SPREAD.format('the band is')}",
    )


def _confusions(panels: Sequence[Panel[Finished]]) -> tuple["Figure", str]:
    """Fig. 8: predictions by class, a column for each framework."""
    names = shown_variants(panels)
    figure, grid = style.grid(len(panels), len(names), 2.3, 2.6)
    for panel, row in zip(panels, grid, strict=True):
        for axes, variant in zip(row, names, strict=True):
            axes.grid(visible=False)
            if seeds := panel.variants.get(variant):
                _confusion(axes, variant, list(seeds.values()))
            else:
                axes.set_axis_off()
            if axes is not row[0]:
                axes.set_yticklabels([])
            if panel is panels[-1]:
                axes.set_xlabel("predicted")
        row[0].set_ylabel(f"{DATASETS[panel.data].title}\nclass")
    words = (
        "Of each class's held-out images the percentage that is taken for each class, those of "
        "all seeds together."
    )
    return figure, f"{words} Above: accuracy, mean over seeds."


def _confusion(axes: "Axes", variant: str, found: Sequence[Finished]) -> None:
    counts = np.sum([each.confusion for each in found], axis=0)
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    for (row, column), share in np.ndenumerate(shares):
        axes.text(
            column,
            row,
            f"{share:.0f}",
            ha="center",
            va="center",
            color="white" if share > 55 else "black",
        )
    places = range(len(shares))
    axes.set_xticks(
        places, found[0].classes, rotation=35, ha="right", rotation_mode="anchor", size=8
    )
    axes.set_yticks(places, found[0].classes, size=8)
    axes.set_title(f"{variant}\n{_spread(found).mean:.1f} %")


def _features(panels: Sequence[Panel[Finished]]) -> tuple["Figure", str]:
    """Fig. 9: features by source, and below by class; a column for each data set and variant."""
    shown = [
        (panel, variant, found.embedding)
        for panel in panels
        for variant, seeds in panel.variants.items()
        for found in list(seeds.values())[:1]
        if found.embedding
    ]
    figure, grid = style.grid(2, len(shown), 3.1, 2.8)
    for (panel, variant, embedding), (upper, lower) in zip(shown, grid.T, strict=True):
        _scatter(upper, embedding, embedding.sources)
        _scatter(lower, embedding, embedding.labels)
        upper.set_title(f"{DATASETS[panel.data].title},\n{variant}" if len(panels) > 1 else variant)
    for axes, word in zip(grid[:, 0], ("by source", "by class"), strict=True):
        axes.set_ylabel(word)
    words = (
        "t-SNE of the shared model's features of all nodes' held-out images: distances between "
        "clusters mean nothing."
    )
    return figure, words


def _scatter(axes: "Axes", embedding: Embedding, kinds: Sequence[str]) -> None:
    style.scatter(axes, embedding.points, kinds, sorted(set(kinds)), size=10)
    axes.set(xticks=[], yticks=[])
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        ncols=2,
        fontsize=8,
        handletextpad=0.1,
        columnspacing=0.8,
    )


def _bars(panels: Sequence[Panel[Finished]]) -> tuple["Figure", str]:
    """Fig. 10: FedTFI without MusTEN beside the other frameworks;
    heads behind PFI and TEL. A row for each data set.
    """
    figure, grid = style.grid(len(panels), 2, 4.2, 3.0, sharey=True)
    for panel, row in zip(panels, grid, strict=True):
        kinds = {
            "others, and FedTFI without MusTEN": [
                name for name in panel.variants if name in FRAMEWORKS
            ],
            "heads behind PFI and TEL": [name for name in panel.variants if name not in FRAMEWORKS],
        }
        for axes, (title, names) in zip(row, kinds.items(), strict=True):
            for place, name in enumerate(names):
                found = _spread(panel.variants[name].values())
                deviation = found.deviation if found.size > 1 else 0.0
                colour = style.REFERENCE if name in _OWN else style.COLOURS[0]
                style.bars(axes, [place], [found.mean], [deviation], 0.62, colour)
            axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
            axes.set(title=title, ylim=(0, 105))
            axes.grid(axis="x", visible=False)
        row[0].set_ylabel(f"{_title(panel)}\naccuracy %")
    return figure, f"Shared model on all nodes' held-out images. {_SPREAD.format('bars are')}"


DRAWN: Mapping[str, Callable[[Sequence[Panel[Finished]]], tuple["Figure", str]]] = {
    "fig6": _learning,
    "fig7": _ranking,
    "fig8": _confusions,
    "fig9": _features,
    "fig10": _bars,
}
"""A figure, and what it shows, in words."""
_LINES = (style.COLOURS[0], style.COLOURS[1], style.REFERENCE)  # F1, AUC, loss


def _curve(
    axes: "Axes", found: Iterable[Finished], measure: Measure, colour: str, label: str
) -> None:
    values = np.array([[measure(point) for point in each.curve] for each in found])
    if values.size:
        style.band(axes, range(1, values.shape[1] + 1), values, colour, label)


def _spread(found: Iterable[Finished]) -> statistics.Spread:
    """Of accuracies, in percent."""
    return statistics.spread(100 * each.accuracy for each in found)


def _gaps(panels: Sequence[Panel[Finished]]) -> str:
    seeds = {
        f"{name} in {_title(panel)}": len(panel.variants.get(name, ()))
        for panel in panels
        for name in shown_variants(panels)
    }
    return list_fewer(max(seeds.values()), seeds)


def _title(panel: Panel[Finished]) -> str:
    return f"{DATASETS[panel.data].title}, {panel.scenario}"


def _colours(panels: Sequence[Panel[Finished]]) -> dict[str, Any]:
    """The same for a variant in all panels."""
    others = [name for name in shown_variants(panels) if name not in _OWN]
    return dict(zip(others, style.COLOURS, strict=False)) | dict.fromkeys(_OWN, style.REFERENCE)
