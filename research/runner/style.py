"""How figures look: light background, text as text, colours after Okabe and Ito; SVG, for documents."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "#D55E00"  # of what the others are compared with
COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#CC79A7", "#E69F00", "#000000", "#F0E442")
_DARK = ("#0072B2", "#000000", "#009E73", REFERENCE)  # what white text is read on
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


def look() -> Any:
    """The look, for a `with` block. ModuleNotFoundError: matplotlib is not installed."""
    import matplotlib as mpl  # noqa: PLC0415  (tables need none)

    return mpl.rc_context(_STYLE)


def grid(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple["Figure", Any]:
    """A figure without a window: `rows` times `columns` panels of a size in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(max(columns * width, 5.5), rows * height + 1), layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def band(axes: "Axes", rounds: Sequence[int] | np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    """The mean of several runs [runs, rounds], and a standard deviation to both sides; a single run has none."""
    mean = values.mean(axis=0)
    axes.plot(rounds, mean, lw=1.5, color=colour, label=label)
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
    look: dict[str, Any] = {"color": colour, "edgecolor": "white", "label": label}
    axes.bar(xs, means, width, yerr=deviations, error_kw={"lw": 0.9, "capsize": 2}, **look)
    ink = "white" if colour in _DARK else "black"
    for x, mean in zip(xs, means, strict=True):
        axes.text(x, 2, f"{mean:.1f}", rotation=90, ha="center", va="bottom", size=8, color=ink)


def legend(figure: "Figure", panels: Any) -> None:
    """One for all panels, above them."""
    shown = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    widest = 0.75 + 0.085 * max(map(len, shown), default=0)  # inches
    columns = max(1, min(len(shown), int(figure.get_figwidth() / widest)))
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=columns)


def save(figure: "Figure", caption: str, path: Path) -> None:
    """With its caption below, as wide as the figure."""
    width = int(figure.get_figwidth() * 16)
    figure.supxlabel("\n".join(textwrap.wrap(caption, width)), fontsize=8, color="#444444", x=0.01, ha="left")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def nothing(path: Path) -> Path:
    """A figure that says that there is nothing to show; returns the path."""
    with look():
        figure, axes = grid(1, 1, 5.5, 0.5)
        axes[0, 0].set_axis_off()
        save(figure, "No cell is finished yet.", path)
    return path
