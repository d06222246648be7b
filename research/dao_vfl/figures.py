"""Figures: a column for each data set, a curve for each variant,
its band a deviation over seeds.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from research.dao_vfl import measures, reported
from research.dao_vfl.cell import Finished
from research.dao_vfl.measures import Measure
from research.runner import style
from research.runner.panels import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(name: str, panels: Sequence[Panel[Finished]]) -> tuple["Figure", str]:
    """An experiment's figure, and its caption."""
    rows = max(len(measures.shown(name, panel.data)) for panel in panels)
    figure, grid = style.grid(rows, len(panels), 4.6, 2.7, sharex="col")
    for panel, column in zip(panels, grid.T, strict=True):
        for axes, measure in zip(column, measures.shown(name, panel.data), strict=True):
            _curves(axes, panel, measure)
            if measure.key == "regret":
                _guides(axes, panel, measure)
        column[0].set_title(reported.DATASETS[panel.data])
        column[-1].set_xlabel("round")
    style.legend(figure, grid)
    conditions = measures.conditions(each.cell for panel in panels for each in panel.results)
    words = "Of products held out of training, mean over seeds; the band is a standard deviation."
    return figure, f"{words} The paper: {reported.CLAIMS[name]} {conditions}"


def _curves(axes: "Axes", panel: Panel[Finished], measure: Measure) -> None:
    for number, variant in enumerate(panel.variants):
        rounds, values = measures.common(measures.curves(panel, measure, variant).values())
        if not rounds:
            continue
        colours = (style.REFERENCE, *style.COLOURS)
        colour, line = colours[number % len(colours)], ("-", "--")[number // len(colours)]
        style.band(axes, rounds, values, colour, variant, line)
    axes.set_ylabel(measure.name)


def _guides(axes: "Axes", panel: Panel[Finished], measure: Measure) -> None:
    """sqrt(T) and T through the end of the first curve."""
    rounds, values = measures.common(
        measures.curves(panel, measure, next(iter(panel.variants))).values()
    )
    if not rounds:
        return
    at, end = np.array(rounds), values.mean(axis=0)[-1]
    axes.plot(
        at, end * np.sqrt(at / at[-1]), color="#666666", lw=0.9, ls="--", label="of order sqrt(T)"
    )
    axes.plot(at, end * at / at[-1], color="#666666", lw=0.9, ls=":", label="of order T")
