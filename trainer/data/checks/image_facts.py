"""Facts of one image before it is resized: size, format, brightness, digest of its pixels, gradients."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from edge.inference.image_decoding import Photo
from trainer.data.folder_scan import Entry

_THUMB = 32  # pixels a side, of what likeness is measured by


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
    gradients: np.ndarray  # float32 [2 * (_THUMB - 1) ** 2], of a thumbnail, of length 1, or 0 for an empty image

    @property
    def size(self) -> str:
        """Width and height, for people."""
        return f"{self.width} x {self.height}"


def measure_image(entry: Entry, photo: Photo, *, held_out: bool = False) -> ImageFacts:
    """Measure one image."""
    image = photo.image
    gray = image.convert("L")
    counts, values = np.array(gray.histogram()), np.arange(256)
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
        _gradients(gray),
    )


def _gradients(gray: Image.Image) -> np.ndarray:
    """A perceptual hash of real numbers: unlike signs of gradients (dHash) it does not depend on what noise decides."""
    thumb = np.asarray(gray.resize((_THUMB, _THUMB), Image.Resampling.BOX), np.float32)
    flat = np.concatenate([np.diff(thumb, axis=0)[:, 1:].ravel(), np.diff(thumb, axis=1)[1:].ravel()])
    return flat / max(float(np.linalg.norm(flat)), 1e-6)
