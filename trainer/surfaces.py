"""Surfaces drawn from a seed: grainy rolled metal with one kind of defect, for trials without a plant's images."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from trainer.seeding import generator

Random = np.random.Generator


class Style(NamedTuple):
    """What differs between plants: camera, light and sheet."""

    brightness: float  # gray value of the bare sheet
    grain: float  # standard deviation of the rolling texture, gray values
    length: float  # of the grain along the rolling direction, share of the image
    noise: float  # of the camera, gray values
    light: tuple[float, float]  # slope across the image, gray values


def style(seed: int, plant: int) -> Style:
    """The look of one plant's images."""
    random = generator(seed, "plant", plant)
    return Style(
        brightness=random.uniform(105, 155),
        grain=random.uniform(6, 12),
        length=random.uniform(0.08, 0.25),
        noise=random.uniform(3, 8),
        light=(random.uniform(-18, 18), random.uniform(-18, 18)),
    )


def draw(labels: np.ndarray, size: int, seed: int, plant: int = 0) -> np.ndarray:
    """Images uint8 [n, size, size, 3] (gray) of the defects `labels` [n], positions in CLASSES."""
    look = style(seed, plant)
    random = generator(seed, "images", plant)
    return np.stack([_image(random, look, size, _DEFECTS[CLASSES[label]]) for label in labels])


def write(folder: Path, per_class: int, size: int, plants: int, seed: int) -> None:
    """Lay out `folder/CLASS/*.png`, `per_class` images of each class, in the styles of `plants` plants in turn."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for plant in range(min(plants, per_class)):
        labels = np.repeat(np.arange(len(CLASSES)), len(range(plant, per_class, plants)))
        for index, (label, image) in enumerate(zip(labels, draw(labels, size, seed, plant), strict=True)):
            Image.fromarray(image).convert("L").save(folder / CLASSES[label] / f"{plant}-{index:04d}.png")


def _image(random: Random, look: Style, size: int, defect: Callable[[Random, int], np.ndarray]) -> np.ndarray:
    y, x = np.mgrid[-0.5 : 0.5 : size * 1j, -0.5 : 0.5 : size * 1j]
    sheet = look.brightness + random.normal(0, 8) + look.light[0] * x + look.light[1] * y
    sheet = sheet + look.grain * (
        0.8 * _field(random, size, 0.008, look.length) + 0.6 * _field(random, size, 0.06, 0.06)
    )
    sheet = sheet + random.uniform(0.45, 1.1) * defect(random, size) + random.normal(0, look.noise, (size, size))
    return np.repeat(sheet.clip(0, 255).astype(np.uint8)[..., None], 3, 2)


def _field(random: Random, size: int, height: float, width: float) -> np.ndarray:
    """Gaussian noise [size, size], smoothed over these shares of the image, mean 0 and deviation 1."""
    spectrum = np.fft.rfft2(random.normal(size=(size, size)))
    fy, fx = np.fft.fftfreq(size)[:, None] * size, np.fft.rfftfreq(size)[None] * size
    smooth = np.fft.irfft2(spectrum * np.exp(-2 * np.pi**2 * ((fy * height) ** 2 + (fx * width) ** 2)), (size, size))
    return np.asarray((smooth - smooth.mean()) / smooth.std())


def _strokes(
    random: Random, size: int, count: int, length: tuple[float, float], width: float, slant: float
) -> np.ndarray:
    """The strongest of `count` soft strokes at each pixel, 0..1: near upright, `slant` radians around it."""
    y, x = np.mgrid[0 : 1 : size * 1j, 0 : 1 : size * 1j]
    strokes = np.zeros((size, size))
    for _ in range(count):
        cy, cx = random.uniform(0.1, 0.9, 2)
        angle, half = random.normal(0, slant), random.uniform(*length) / 2
        along = (y - cy) * np.cos(angle) + (x - cx) * np.sin(angle)
        across = (x - cx) * np.cos(angle) - (y - cy) * np.sin(angle)
        thick = width * random.uniform(0.6, 1.5)
        stroke = np.exp(-((across / thick) ** 2)) / (1 + np.exp((np.abs(along) - half) / 0.02))
        strokes = np.maximum(strokes, stroke)
    return strokes


def _crazing(random: Random, size: int) -> np.ndarray:
    """A net of fine dark cracks, where a smooth field crosses zero."""
    cracks = np.exp(-((_field(random, size, 0.035, 0.06) / 0.14) ** 2))
    return np.asarray(-38 * cracks * (0.6 + 0.4 * np.tanh(_field(random, size, 0.15, 0.15))))


def _inclusion(random: Random, size: int) -> np.ndarray:
    """A few dark streaks of foreign matter with ragged edges."""
    streaks = _strokes(random, size, int(random.integers(1, 5)), (0.1, 0.6), 0.022, 0.12)
    ragged = 1 / (1 + np.exp(-8 * (streaks + 0.22 * _field(random, size, 0.02, 0.02) - 0.5)))
    return np.asarray(-75 * ragged)


def _patches(random: Random, size: int) -> np.ndarray:
    """Large blotches."""
    return np.asarray(-50 / (1 + np.exp(-6 * (_field(random, size, 0.11, 0.09) - random.uniform(0.3, 0.9)))))


def _pitted_surface(random: Random, size: int) -> np.ndarray:
    """Many small pits, denser in places."""
    pits = _field(random, size, 0.014, 0.014) + 0.7 * _field(random, size, 0.12, 0.2)
    return np.asarray(-60 / (1 + np.exp(-7 * (pits - 1.75))))


def _rolled_in_scale(random: Random, size: int) -> np.ndarray:
    """Flakes pressed into the sheet: dark, with a bright rim, stretched along the rolling direction."""
    flakes = _field(random, size, 0.028, 0.07)
    return np.asarray(-42 / (1 + np.exp(-8 * (flakes - 0.75))) + 16 * np.exp(-(((flakes - 0.55) / 0.2) ** 2)))


def _scratches(random: Random, size: int) -> np.ndarray:
    """One to four long bright lines."""
    return 80 * _strokes(random, size, int(random.integers(1, 5)), (0.4, 1.4), 0.011, 0.2)


_DEFECTS: dict[str, Callable[[Random, int], np.ndarray]] = {
    "crazing": _crazing,
    "inclusion": _inclusion,
    "patches": _patches,
    "pitted_surface": _pitted_surface,
    "rolled-in_scale": _rolled_in_scale,
    "scratches": _scratches,
}
CLASSES = tuple(_DEFECTS)
"""The defects that are drawn, named as in NEU-CLS."""
