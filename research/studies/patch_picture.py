"""A picture of what `research.studies.patch_leak` reconstructs, from drawn textures.

python -m research.studies.patch_picture docs/patch_leak.webp --weights VGG.safetensors
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from research.runner import style
from research.studies.patch_leak import SIZE, Asked, View, attack, drawn, federation, seen
from trainer.privacy.patch_protection import Floats, Protection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN, SEED = 6, 0
CAPTION = (
    "Drawn textures, and what an attacker that has 240 others of the same plant makes of their "
    "maps: whole images of 64 pixels, then the 8 x 8 pixels under an item's first channel. "
    "Protected: noise=0.5 levels=4 mix=4."
)
UNPROTECTED, PROTECTED = Protection(), Protection(noise=0.5, levels=4, mix=4)
COLUMNS: tuple[tuple[str, View, Protection], ...] = (
    ("whole maps\n(never sent)", "maps", UNPROTECTED),
    ("16 items,\nplaces known", "16 places known", UNPROTECTED),
    ("one place\n(never sent)", "one place", UNPROTECTED),
    ("1 item,\nas sent", "sent", UNPROTECTED),
    ("1 item,\nprotected", "sent", PROTECTED),
)


class Column(NamedTuple):
    """Images [n, 3, s, s], as bright as those that they are compared with."""

    title: str
    images: Floats
    truth: Floats


def save(columns: Sequence[Column], path: Path) -> None:
    """Columns of images, in gray."""
    style.write(partial(_draw, columns), path)


def _draw(columns: Sequence[Column]) -> tuple["Figure", str]:
    figure, panels = style.grid(
        SHOWN, len(columns), 0.9, 0.9, gridspec_kw={"wspace": 0.05, "hspace": 0.05}
    )
    for shown, column in zip(panels.T, columns, strict=True):
        shown[0].set_title(column.title, fontsize=8)
        for axes, image in zip(shown, column.images.mean(1), strict=False):
            axes.imshow(image, cmap="gray", vmin=column.truth.min(), vmax=column.truth.max())
            axes.set_axis_off()
    return figure, CAPTION


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="PNG, WebP or SVG")
    parser.add_argument(
        "--weights", default="none", help="of the stem: none, imagenet or a safetensors file"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    pool = drawn(SIZE, SEED)
    plants = seen(pool, *federation(pool, given.weights, UNPROTECTED, 0, SEED)[:2])
    columns: list[Column] = []
    for title, view, protection in COLUMNS:
        found = attack(
            plants,
            Asked(
                data="drawn", knows="same", view=view, protection=protection, rounds=0, seed=SEED
            ),
        )
        guess, truth = found.guess[:SHOWN], found.truth[:SHOWN]
        if not columns or view in ("one place", "sent"):
            columns.append(Column("pixels\nunder it" if columns else "image", truth, truth))
        columns.append(Column(title, guess, truth))
    save(columns, given.out)


if __name__ == "__main__":
    main()
