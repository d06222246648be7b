"""Style of figures: light background, text as text, colours after Okabe and Ito; SVG,
for documents.
"""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "#D55E00"  # for what the others are compared with
COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#CC79A7", "#E69F00", "#000000", "#F0E442")
MARKERS = "osD^vP*X"  # tell apart what has the same colour
_DARK = ("#0072B2", "#000000", "#009E73", REFERENCE)  # on which text is white
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "edge-node",  # the same cells give the same file
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def grid(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple["Figure", Any]:
    """A figure without a window: `rows` times `columns` panels of a size in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(
        figsize=(max(columns * width, 5.5), rows * height + 1),
        layout="constrained",
        facecolor="white",
    )
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def band(
    axes: "Axes",
    rounds: Sequence[int] | np.ndarray,
    values: np.ndarray,
    colour: str,
    label: str,
    line: str = "-",
) -> None:
    """The mean of several runs [runs, rounds], and a standard deviation to both sides;
    a single run has none.
    """
    mean = values.mean(axis=0)
    axes.plot(rounds, mean, line, lw=1.5, color=colour, label=label)
    axes.locator_params(axis="x", integer=True)
    if len(values) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)


def bars(
    axes: "Axes",
    xs: Sequence[float],
    means: Sequence[float],
    deviations: Sequence[float],
    width: float,
    colour: str,
    label: str | None = None,
) -> None:
    """Bars that bear their numbers, standard deviations on top."""
    axes.bar(
        xs,
        means,
        width,
        yerr=deviations,
        error_kw={"lw": 0.9, "capsize": 2},
        color=colour,
        edgecolor="white",
        label=label,
    )
    ink = "white" if colour in _DARK else "black"
    for x, mean in zip(xs, means, strict=True):
        axes.text(x, 2, f"{mean:.1f}", rotation=90, ha="center", va="bottom", size=8, color=ink)


def scatter(
    axes: "Axes",
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    classes: Sequence[str],
    size: float,
) -> None:
    """Points in two dimensions, a colour and a marker for each class."""
    places, its = np.array(points), np.array(labels)
    colours = (COLOURS[0], REFERENCE, *COLOURS[1:])
    for number, name in enumerate(classes):
        if (own := its == name).any():
            options: dict[str, Any] = {
                "color": colours[number % 8],
                "marker": MARKERS[number % 8],
                "label": name,
            }
            axes.scatter(places[own, 0], places[own, 1], s=size, alpha=0.8, lw=0, **options)


def legend(figure: "Figure", panels: Any) -> None:
    """One for all panels, above them."""
    shown = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    widest = 0.75 + 0.085 * max(map(len, shown), default=0)  # inches
    columns = max(1, min(len(shown), int(figure.get_figwidth() / widest)))
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=columns)


def write(draw: Callable[[], tuple["Figure", str]], path: Path) -> None:
    """Draw a figure in this style, and write it with its caption below.

    ModuleNotFoundError: no matplotlib.
    """
    import matplotlib as mpl  # noqa: PLC0415  (tables need none)

    with mpl.rc_context(_STYLE):
        figure, caption = draw()
        width = int(figure.get_figwidth() * 16)
        figure.supxlabel(
            "\n".join(textwrap.wrap(caption, width)), fontsize=8, color="#444444", x=0.01, ha="left"
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
