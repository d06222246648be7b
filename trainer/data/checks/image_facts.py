"""What one image of a plant is like, before it is brought to a network's size."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from edge.inference.image_decoding import Photo
from trainer.data.class_folders import Entry

_THUMB = 32  # pixels a side, of what likeness is measured by


class Look(NamedTuple):
    """What one image is like, before it is brought to the network's size."""

    path: Path
    class_name: str
    held_out: bool
    width: int
    height: int
    format: str
    mode: str
    camera: str
    brightness: float  # mean gray value
    contrast: float  # standard deviation of gray values
    pixels: bytes  # digest: the same for the same pixels, however they are stored
    gradients: np.ndarray  # float32 [2 * (_THUMB - 1) ** 2], of a thumbnail, of length 1, or 0 for an empty image

    @property
    def size(self) -> str:
        """Width and height, for people."""
        return f"{self.width} x {self.height}"


def look(entry: Entry, photo: Photo, *, held_out: bool = False) -> Look:
    """Look at one image."""
    image = photo.image
    gray = image.convert("L")
    counts, values = np.array(gray.histogram()), np.arange(256)
    mean = float(counts @ values / counts.sum())
    pixels = hashlib.sha256(f"{image.size}".encode() + image.convert("RGB").tobytes()).digest()
    return Look(
        entry.path,
        entry.class_name,
        held_out,
        *image.size,
        photo.format,
        photo.mode,
        photo.camera,
        mean,
        float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())),
        pixels,
        _gradients(gray),
    )


def _gradients(gray: Image.Image) -> np.ndarray:
    """A perceptual hash of real numbers: unlike signs of gradients (dHash) it does not depend on what noise decides."""
    thumb = np.asarray(gray.resize((_THUMB, _THUMB), Image.Resampling.BOX), np.float32)
    flat = np.concatenate([np.diff(thumb, axis=0)[:, 1:].ravel(), np.diff(thumb, axis=1)[1:].ravel()])
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


def into(looks: list[Look], *, held_out: bool) -> Callable[[Entry, Photo], None]:
    """What looks at each image that it is shown, and keeps the look."""
    return lambda entry, photo: looks.append(look(entry, photo, held_out=held_out))
