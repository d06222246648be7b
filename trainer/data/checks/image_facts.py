"""Facts of one image before it is resized: size, format, brightness,
digest of its pixels, thumbnail.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.inference.image_decoding import Photo
from trainer.data.checks.likeness import make_thumbnail
from trainer.data.folder_scan import Entry


class ImageFacts(NamedTuple):
    """Properties of one image, before it is resized to the network's input."""

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
    thumbnail: np.ndarray  # uint8 [SIDE, SIDE], gray: what likeness is measured on
    bits: int = 0  # that the brightest pixel of an image of 16 bits takes; 0 for other images

    @property
    def size(self) -> str:
        """Width and height, for people."""
        return f"{self.width} x {self.height}"


def measure_image(entry: Entry, photo: Photo, *, held_out: bool = False) -> ImageFacts:
    """Measure one image."""
    image = photo.image
    gray = image.convert("L")
    counts = np.array(gray.histogram())
    values = np.arange(256)
    mean = float(counts @ values / counts.sum())
    pixels = hashlib.sha256(f"{image.size}".encode() + image.convert("RGB").tobytes()).digest()
    return ImageFacts(
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
        make_thumbnail(gray),
        photo.bits,
    )
