"""Surfaces drawn from a seed: rolled metal with one kind of defect or none,
as several plants' cameras would see it.

The rolling direction is upright. Lengths are shares of the image, amplitudes are gray values.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from broker_config.protocol.errors import UsageError
from broker_config.storage.disk import writing
from edge.inference.image_decoding import annotated_tags
from trainer.progress.events import Report, Step
from trainer.seeding import generator

Random = np.random.Generator
_MAX_PLANTS_SHOWN = 8  # plants on a contact sheet
_BATCH = 64  # images that are drawn at once: their fields stay in the processor's cache


class Style(NamedTuple):
    """What differs between plants: sheet, light, camera, and the defects that its process makes."""

    brightness: float  # of the bare sheet
    grain: float  # amplitude of the rolling texture
    grain_length: float  # along the rolling direction
    grain_width: float
    mottle: float  # amplitude of clouds
    stripes: float  # amplitude of the rolls' marks along the rolling direction
    light: tuple[float, float]  # slope across the image, down and right
    vignette: float  # darkening towards the corners
    blur: float  # 0 (sharp) to 1 (neighbouring pixels averaged)
    contrast: float  # factor of all that differs from the brightness
    noise: float  # standard deviation of the camera's
    scale: float  # of the defects' sizes: a camera's distance
    severity: float  # factor of the defects' contrast
    density: float  # -1 (sparse) to 1 (dense)


def draw_style(seed: int, plant: int) -> Style:
    """The style of one plant's images."""
    random = generator(seed, "plant", plant)
    return Style(
        brightness=random.uniform(85, 175),
        grain=random.uniform(2, 13),
        grain_length=0.006 * 33 ** random.random(),
        grain_width=random.uniform(0.004, 0.016),
        mottle=random.uniform(1, 9),
        stripes=random.uniform(0, 5),
        light=(random.uniform(-35, 35), random.uniform(-35, 35)),
        vignette=random.uniform(0, 25),
        blur=random.uniform(0, 1),
        contrast=0.25 * 5 ** random.random(),
        noise=0.7 * 8 ** random.random(),
        scale=random.uniform(0.75, 1.5),
        severity=random.uniform(0.6, 1.3),
        density=random.uniform(-1, 1),
    )


def draw_images(labels: np.ndarray, size: int, seed: int, plant: int = 0) -> np.ndarray:
    """Images uint8 [n, size, size, 3] (gray) of the defects `labels` [n], positions in CLASSES."""
    style = draw_style(seed, plant)
    random = generator(seed, "images", plant)
    images = np.empty((len(labels), size, size), np.uint8)
    for name, defect in DEFECTS.items():
        (places,) = np.nonzero(np.asarray(labels) == CLASSES.index(name))
        for start in range(0, len(places), _BATCH):
            some = places[start : start + _BATCH]
            images[some] = draw_photographs(random, style, len(some), size, defect)
    return np.repeat(images[..., None], 3, -1)


def write_plant(folder: Path, per_class: int, size: int, seed: int, plant: int) -> None:
    """Write `per_class` images of each class, as plant number `plant` sees them, to
    `folder/CLASS/PLANT-NUMBER.png`.
    """
    images = draw_images(np.repeat(np.arange(len(CLASSES)), per_class), size, seed, plant)
    for index, image in enumerate(images[..., 0]):
        target = folder / CLASSES[index // per_class] / f"{plant}-{index % per_class:04d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target)


def write_plants(
    out: Path, plants: int, per_class: int, size: int, seed: int, report: Report
) -> int:
    """Write `out/plant-1/CLASS/*.png` and so on, and `out/contact-sheet.png`;
    returns the number of images.

    Raises:
        UsageError: `out` holds something already.
        EdgeNodeError: the disk does not take it.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists already and is not an empty folder", "pass another folder")
    with writing(out):
        for plant in range(plants):
            report(Step(what=f"drawing plant {plant + 1} of {plants}"))
            write_plant(out / f"plant-{plant + 1}", per_class, size, seed, plant)
        sheet = draw_contact_sheet(seed, min(plants, _MAX_PLANTS_SHOWN), size)
        sheet.save(out / "contact-sheet.png", exif=annotated_tags())
    return plants * per_class * len(CLASSES)


def draw_contact_sheet(seed: int, plants: int, size: int, per_class: int = 2) -> Image.Image:
    """A row for each class, `per_class` images for each plant side by side."""
    columns = [
        draw_images(np.repeat(np.arange(len(CLASSES)), per_class), size, seed, plant)[
            ..., 0
        ].reshape(-1, per_class, size, size)
        for plant in range(plants)
    ]
    rows = np.concatenate(columns, 1).transpose(0, 2, 1, 3)
    return Image.fromarray(rows.reshape(len(CLASSES) * size, plants * per_class * size))


# The sheet and the camera


def _draw_sheets(random: Random, style: Style, count: int, size: int) -> np.ndarray:
    """Bare sheets float32 [n, S, S] in the plant's light, without its brightness."""
    y, x = _make_positions(size)
    # from one photograph to the next
    varied = random.uniform(0.6, 1.4, (6, count, 1, 1)).astype(np.float32)
    sheet = (
        style.grain
        * varied[0]
        * draw_field(random, count, size, style.grain_length, style.grain_width)
    )
    sheet += style.mottle * varied[1] * draw_field(random, count, size, 0.12, 0.08)
    sheet += style.stripes * varied[2] * _draw_stripes(random, count, size)
    sheet += style.light[0] * varied[3] * y + style.light[1] * varied[4] * x
    sheet -= style.vignette * varied[5] * 2 * (x**2 + y**2)
    return np.asarray(sheet)


def draw_photographs(
    random: Random, style: Style, count: int, size: int, defect: "Defect"
) -> np.ndarray:
    """Gray images uint8 [n, S, S] of sheets that have this defect."""
    sheet = _draw_sheets(random, style, count, size)
    severity = style.severity * random.uniform(0.6, 1.3, (count, 1, 1)).astype(np.float32)
    brightness = random.normal(style.brightness, 10, (count, 1, 1)).astype(np.float32)
    seen = brightness + style.contrast * _blur(
        sheet + severity * defect(random, style, count, size), style.blur
    )
    seen += style.noise * random.standard_normal(seen.shape, np.float32)
    return seen.clip(0, 255).astype(np.uint8)


def _blur(images: np.ndarray, share: float) -> np.ndarray:
    """Each pixel mixed with its neighbours, first down, then across."""
    for turned in (images.swapaxes(1, 2), images):
        mixed = 0.25 * share * (turned[..., :-2] + turned[..., 2:] - 2 * turned[..., 1:-1])
        turned[..., 1:-1] += mixed
    return images


# Random fields


@cache
def _make_positions(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Down [S, 1] and right [1, S], from -0.5 to 0.5."""
    line = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    return line[:, None], line[None]


@cache
def _make_frequencies(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of rfft2, in periods an image: down [S, 1] and right [1, S // 2 + 1]."""
    down = np.fft.fftfreq(size, 1 / size)
    right = np.fft.rfftfreq(size, 1 / size)
    return down.astype(np.float32)[:, None], right.astype(np.float32)[None]


def draw_field(
    random: Random,
    count: int,
    size: int,
    height: float,
    width: float,
    slant: float | np.ndarray = 0.0,
) -> np.ndarray:
    """Gaussian noise float32 [n, S, S] smoothed over a height and a width, mean 0 and deviation 1.

    `slant` turns it, radians, one for all or [n, 1, 1].
    """
    down, right = _make_frequencies(size)
    if np.any(slant):
        cosine = np.cos(slant, dtype=np.float32)
        sine = np.sin(slant, dtype=np.float32)
        turned = down * cosine - right * sine
        right = down * sine + right * cosine
        down = turned
    smooth = np.exp(np.float32(-2 * np.pi**2) * ((down * height) ** 2 + (right * width) ** 2))
    noise = random.standard_normal((count, size, size // 2 + 1, 2), np.float32).view(np.complex64)[
        ..., 0
    ]
    noise *= smooth
    noise[:, 0, 0] = 0
    field = np.fft.irfft2(noise, (size, size))
    field /= field.std((1, 2), keepdims=True)
    return np.asarray(field)


def _draw_stripes(random: Random, count: int, size: int) -> np.ndarray:
    """Noise float32 [n, 1, S] along the width, coarse and fine, deviation about 1."""
    noise = random.standard_normal((count, 1, size), np.float32)
    coarse = np.cumsum(noise, 2)
    width = max(1, size // 12)
    coarse[..., width:] = coarse[..., width:] - coarse[..., :-width]
    return np.asarray(0.5 * noise + 0.8 * coarse / np.sqrt(width, dtype=np.float32))


def soft_step(values: np.ndarray, sharpness: float) -> np.ndarray:
    """0 below zero, 1 above, soft in between."""
    return np.asarray(0.5 + 0.5 * np.tanh((0.5 * sharpness) * values))


def shade_relief(height: np.ndarray) -> np.ndarray:
    """Light and shadow on the slopes of a height, lit from above."""
    return np.asarray(np.roll(height, 1, 1) - np.roll(height, -1, 1))


def _draw_threshold(random: Random, field: np.ndarray, low: float, high: float) -> np.ndarray:
    """A threshold [n, 1, 1] that the field's highest place passes by `low` to `high` deviations."""
    drop = random.uniform(low, high, (len(field), 1, 1)).astype(np.float32)
    return np.asarray(field.max((1, 2), keepdims=True) - drop)


# The defects: what each adds to n sheets of S x S pixels

Defect = Callable[[Random, Style, int, int], np.ndarray]


def _crazing(random: Random, style: Style, count: int, size: int) -> np.ndarray:
    """A net of fine dark cracks, broken off in places, on a roughened sheet."""
    s = style.scale
    cracks = 1 - soft_step(np.abs(draw_field(random, count, size, 0.03 * s, 0.05 * s)) - 0.08, 40)
    there = soft_step(draw_field(random, count, size, 0.1 * s, 0.1 * s) + 0.5 * style.density, 5)
    rough = draw_field(random, count, size, 0.005, 0.005)
    return np.asarray(12 * rough - (45 + 15 * rough) * cracks * there)


def _inclusion(random: Random, style: Style, count: int, size: int) -> np.ndarray:
    """Dark streaks of foreign matter along the rolling direction, with ragged ends."""
    s = style.scale
    slant = random.normal(0, 0.08, (count, 1, 1))
    streaks = draw_field(random, count, size, 0.09 * s, 0.011 * s, slant)
    streaks += 0.2 * draw_field(random, count, size, 0.02, 0.008)
    there = soft_step(streaks - _draw_threshold(random, streaks, 0.5, 1.7 + 0.5 * style.density), 7)
    return np.asarray(-48 * there * (1 + 0.25 * draw_field(random, count, size, 0.03, 0.01)))


def _no_defect(_random: Random, _style: Style, count: int, size: int) -> np.ndarray:
    """The bare sheet."""
    return np.zeros((count, size, size), np.float32)


def _patches(random: Random, style: Style, count: int, size: int) -> np.ndarray:
    """Large dark blotches with a ragged, darker rim; small dark crumbs beside them."""
    s = style.scale
    edge = 0.12 * draw_field(random, count, size, 0.015, 0.015)
    blotches = draw_field(random, count, size, 0.11 * s, 0.08 * s) + edge
    over = blotches - _draw_threshold(random, blotches, 0.8, 2.6 + 0.5 * style.density)
    rim = np.exp(-(((over - 0.1) / 0.15) ** 2))
    crumbs = draw_field(random, count, size, 0.009, 0.011) + 1.2 * draw_field(
        random, count, size, 0.12, 0.12
    )
    return np.asarray(
        -(65 + 60 * edge) * soft_step(over, 14) - 18 * rim - 60 * soft_step(crumbs - 3.6, 8)
    )


def _pitted_surface(random: Random, style: Style, count: int, size: int) -> np.ndarray:
    """Many small round pits, lit on one side, denser in places."""
    s = style.scale
    pits = draw_field(random, count, size, 0.011 * s, 0.011 * s)
    dense = draw_field(random, count, size, 0.2, 0.12)
    level = 2.1 - 0.5 * style.density + random.uniform(-0.5, 0.5, (count, 1, 1)).astype(np.float32)
    there = soft_step(pits + 0.7 * dense - level, 6)
    return np.asarray(-42 * there + 22 * shade_relief(there))


def _rolled_in_scale(random: Random, style: Style, count: int, size: int) -> np.ndarray:
    """Scale pressed into a clouded sheet: short dark flakes with bright flanks,
    across the rolling direction.
    """
    s = style.scale
    slant = random.normal(0.25, 0.15, (count, 1, 1))
    flakes = draw_field(random, count, size, 0.009 * s, 0.024 * s, slant) + 0.6 * draw_field(
        random, count, size, 0.15, 0.15
    )
    clouds = draw_field(random, count, size, 0.03 * s, 0.09 * s, slant)
    there = soft_step(flakes - _draw_threshold(random, flakes, 1.4, 2.4 + 0.4 * style.density), 6)
    return np.asarray(7 * clouds - 48 * there + 26 * shade_relief(there))


def _scratches(random: Random, style: Style, count: int, size: int) -> np.ndarray:
    """One to four long lines, mostly bright and along the rolling direction."""
    y, x = _make_positions(size)
    image = np.zeros((count, size, size), np.float32)
    rough = 0.7 + 0.3 * draw_field(random, count, size, 0.05, 0.004)
    number = random.integers(1, 4 + round(style.density), count)
    for line in range(number.max()):
        cy, cx, angle, long, thick, tone, dark = _draw_stroke(random, style, count)
        along = (y - cy) * np.cos(angle) + (x - cx) * np.sin(angle)
        across = (x - cx) * np.cos(angle) - (y - cy) * np.sin(angle)
        across += 0.15 * along**2 * np.sin(40 * cy)  # slightly bent
        stroke = soft_step(thick - np.abs(across), 700) * soft_step(long - np.abs(along), 60)
        image += np.where(dark, -0.6, 1) * tone * stroke * (line < number)[:, None, None]
    return np.asarray(image * rough)


def _draw_stroke(random: Random, style: Style, count: int) -> tuple[np.ndarray, ...]:
    """Of a line an image, each [n, 1, 1]: centre, angle to the rolling direction,
    half length and width, tone, dark.
    """
    across = random.random(count) < 0.12
    drawn = (
        *random.uniform(-0.4, 0.4, (2, count)),
        np.where(
            across, random.uniform(-np.pi / 2, np.pi / 2, count), random.normal(0, 0.06, count)
        ),
        random.uniform(0.12, 0.8, count),
        style.scale * 0.003 * np.exp(random.exponential(0.7, count)),
        random.uniform(40, 110, count),
        random.random(count) < 0.15,
    )
    return tuple(np.asarray(values)[:, None, None].astype(np.float32) for values in drawn)


DEFECTS: dict[str, Defect] = {
    "crazing": _crazing,
    "inclusion": _inclusion,
    "no_defect": _no_defect,
    "patches": _patches,
    "pitted_surface": _pitted_surface,
    "rolled-in_scale": _rolled_in_scale,
    "scratches": _scratches,
}
CLASSES = tuple(DEFECTS)
"""The defects that are drawn, named as in NEU-CLS, and `no_defect`."""
