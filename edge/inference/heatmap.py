"""Heatmaps: from class activation maps of a frame's tiles to colours where the frame shows
evidence for a class.

After Zhou et al., "Learning deep features for discriminative localization", CVPR 2016.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge.inference.outcomes import Box

# cividis (Nunez et al., PLoS ONE 2018): from dark blue to yellow, its brightness grows evenly for
# all eyes.
_STOPS = (
    (0, 34, 78),
    (58, 72, 107),
    (112, 113, 115),
    (165, 156, 116),
    (220, 204, 92),
    (254, 232, 56),
)
_TABLE = np.array(
    [
        np.interp(np.linspace(0, 1, 256), np.linspace(0, 1, 6), channel)
        for channel in zip(*_STOPS, strict=True)
    ]
)
_TABLE = (_TABLE.T + 0.5).astype(np.uint8)  # [256, 3]
_OPACITY = 0.35, 0.65  # of the heatmap over the frame, where it is 0 and where it is greatest


def class_heat(
    maps: NDArray[np.float32], label: int, boxes: Sequence[Box], scale: float, size: tuple[int, int]
) -> NDArray[np.float32]:
    """Evidence for a class by each encoder: float32 [encoders, height, width], 0 or more,
    of a picture of this size.

    Args:
        maps: [tiles, encoders, classes, h, w]; averaged over h and w and added up they are logits.
        label: the class. What a place adds to its logit counts as far as it exceeds the mean over
            all classes: what it adds to all alike changes no probability.
        boxes: the tiles' places in the frame. Where they overlap one blends smoothly into the next.
        scale: pixels of the picture for a pixel of the frame.
        size: width and height of the picture.
    """
    evidence = np.maximum(maps[:, :, label] - maps.mean(2), 0)
    found = np.zeros((maps.shape[1], size[1], size[0]), np.float32)
    weights = np.full((size[1], size[0]), 1e-9, np.float32)
    for tile, box in zip(evidence, boxes, strict=True):
        left, top, right, bottom = scale_box(box, scale)
        area = np.s_[top:bottom, left:right]
        weight = np.outer(_tent(bottom - top), _tent(right - left))[
            : size[1] - top, : size[0] - left
        ]
        weights[area] += weight
        for canvas, one in zip(found, tile, strict=True):
            drawn = np.asarray(
                Image.fromarray(one).resize((right - left, bottom - top), Image.Resampling.BILINEAR)
            )
            canvas[area] += weight * drawn[: weight.shape[0], : weight.shape[1]]
    return found / weights


def _tent(length: int) -> NDArray[np.float32]:
    """Weight of each pixel along a tile's side: greatest in the middle."""
    rising = np.arange(1, length + 1, dtype=np.float32)
    return np.minimum(rising, rising[::-1])


def scale_box(box: Box, scale: float) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a rectangle in a picture `scale` times as large,
    at least a pixel each way.
    """
    left = round(box.left * scale)
    top = round(box.top * scale)
    right = round((box.left + box.width) * scale)
    bottom = round((box.top + box.height) * scale)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def overlay(image: Image.Image, strength: NDArray[np.float32]) -> Image.Image:
    """An image in gray, RGB, under the heat colours of `strength`, [height, width] from 0 to 1."""
    gray = np.asarray(image.convert("L"), np.float32)[..., None]
    least, most = _OPACITY
    opacity = (least + (most - least) * strength)[..., None]
    return Image.fromarray((gray + opacity * (heat_colors(strength) - gray) + 0.5).astype(np.uint8))


def heat_colors(strength: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Values from 0 to 1 -> RGB, uint8 [..., 3]."""
    return _TABLE[(strength * 255 + 0.5).astype(np.uint8)]
