"""Figure of what patch_leak measured: the leakage of protected patches against the accuracy
reached with them.

python -m research.studies.patch_leak --kth FOLDER --weights VGG.safetensors --accuracy --seeds 0 1
2 python -m research.studies.patch_figure --out research/results/studies/patch_leak.svg
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from research.runner import style
from research.runner.store import Records
from research.studies.patch_leak import Leak
from trainer.privacy.patch_protection import Protection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Measure(NamedTuple):
    """How much patches tell; the more, the worse."""

    name: str  # as an axis has it
    of: Callable[[Leak], float]
    nothing: Callable[[Leak], float]  # where nothing is told


MEASURES = (
    Measure(
        "class told, %",
        lambda leak: 100 * leak.told["class"],
        lambda leak: 100 * leak.told["most frequent class"],
    ),
    Measure("plant told, %", lambda leak: 100 * leak.told["plant"], lambda _: 50),
    Measure("image found, AUC", lambda leak: leak.told["found"], lambda _: 0.5),
    Measure("images linked, AUC", lambda leak: leak.told["linked"], lambda _: 0.5),
    Measure("PSNR above a guess, dB", lambda leak: leak.psnr - leak.guess_psnr, lambda _: 0),
)
Place = tuple[str, float]  # a way of protection, and how much of it
# of each seed: what is told, and accuracy in percent
Points = Mapping[Place, Sequence[tuple[float, float]]]
OPEN: Place = ("as they are", 0.0)
TOGETHER: Place = ("all three", 0.0)
WAYS = {"noise": style.COLOURS[0], "levels": style.COLOURS[1], "mix": style.COLOURS[4]}
SHIFTS = {"noise": (-8, 4), "levels": (8, -10), "mix": (8, 4)}  # of what is written at a point
WORDS = (
    "An attacker with images of the victim's source looks at items as they are sent. Mean over "
    "seeds; bars are a standard deviation over seeds. Numbers: noise in deviations of a channel, "
    "levels of a value, images in a mixture."
)


def draw(leaks: Iterable[Leak], path: Path) -> Path:
    """Draw accuracy over each measure, a row for each data set, and return the path.

    A line begins at patches as they are, and goes on to ever stronger protection of one kind.

    Raises:
        ValueError: there is nothing to draw.
        ModuleNotFoundError: matplotlib is not installed.
    """
    rows: dict[str, list[Leak]] = defaultdict(list)
    for each in leaks:
        if each.accuracy is not None and (each.asked.view, each.asked.knows) == ("sent", "same"):
            rows[f"{each.asked.data}, {each.asked.rounds} rounds"].append(each)
    if not rows:
        raise ValueError("there are no accuracies: run patch_leak with --accuracy")
    style.write(partial(_draw, rows), path)
    return path


def _draw(rows: Mapping[str, Sequence[Leak]]) -> tuple["Figure", str]:
    figure, grid = style.grid(len(rows), len(MEASURES), 2.9, 2.7, sharey="row", sharex="col")
    for (place, own), row in zip(rows.items(), grid, strict=True):
        for axes, measure in zip(row, MEASURES, strict=True):
            _panel(axes, own, measure)
        row[0].set_ylabel(f"{place}\naccuracy %")
    for axes, measure in zip(grid[-1], MEASURES, strict=True):
        axes.set_xlabel(measure.name)
    style.legend(figure, grid)
    return figure, WORDS


def _panel(axes: "Axes", leaks: Sequence[Leak], measure: Measure) -> None:
    points: dict[Place, list[tuple[float, float]]] = defaultdict(list)
    for each in leaks:
        points[_place(each.asked.protection)].append((measure.of(each), 100 * (each.accuracy or 0)))
    nothing = float(np.mean([measure.nothing(each) for each in leaks]))
    axes.axvline(nothing, color="#666666", lw=0.8, ls=":", label="nothing is told")
    for way, colour in WAYS.items():
        mine = {place: found for place, found in points.items() if place[0] == way}
        ordered = sorted(mine, reverse=way == "levels")  # of which fewer protect more
        middles = [np.mean(points[place], axis=0) for place in (OPEN, *ordered) if place in points]
        axes.plot(*np.transpose(middles).reshape(2, -1), color=colour, lw=1)
        _points(axes, mine, colour, "o", way)
    for place, colour, marker in ((TOGETHER, style.REFERENCE, "*"), (OPEN, "#000000", "s")):
        if place in points:
            _points(axes, {place: points[place]}, colour, marker, place[0])


def _points(axes: "Axes", points: Points, colour: str, marker: str, label: str) -> None:
    for (way, strength), found in points.items():
        (x, y), spread = (
            np.mean(found, axis=0),
            np.std(found, axis=0, ddof=1) if len(found) > 1 else np.zeros(2),
        )
        axes.errorbar(
            x, y, spread[1], spread[0], fmt=marker, color=colour, ms=5, elinewidth=0.6, label=label
        )
        if way in SHIFTS:
            axes.annotate(
                f"{strength:g}",
                (x, y),
                SHIFTS[way],
                textcoords="offset points",
                size=7,
                color=colour,
                ha="center",
            )


def _place(protection: Protection) -> Place:
    given = {
        "noise": protection.noise,
        "levels": protection.levels,
        "mix": protection.mix if protection.mix > 1 else 0,
    }
    used = [(way, float(strength)) for way, strength in given.items() if strength]
    return OPEN if not used else used[0] if len(used) == 1 else TOGETHER


def main() -> None:
    """Draw what the file holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=Path("research/results/studies/patch_leak.jsonl"),
        help="of patch_leak",
    )
    parser.add_argument("--out", type=Path, default=Path("research/results/studies/patch_leak.svg"))
    given = parser.parse_args()
    print(draw(Records(given.file, Leak), given.out))


if __name__ == "__main__":
    main()
