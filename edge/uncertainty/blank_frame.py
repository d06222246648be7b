"""Detection of blank frames: one gray, black or white, saturated,
or the sensor's noise and nothing else.

The region is averaged to a map of about 4,000 cells. Light that falls off towards the edges is
removed (a quadratic surface); of what remains, noise is independent from cell to cell, while
whatever a lens has imaged is not. So a map is blank if it hardly varies, or if no cell tells of its
neighbours. `research/studies/blank_frames.py` has the figures behind the constants.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge.inference.image_decoding import Photo
from edge.inference.outcomes import Box

_CELLS = 64  # of the map, the square root of their number
_SAMPLES = 4  # of a cell, a side: of larger frames not every pixel is read
_LEAST_DEVIATION = 0.8  # gray values: 1.4 on the plainest of drawn surfaces, 2.0 on steel
# Least correlation of cells that are 1 to 4 apart: 0.05 at most in noise, but neighbours have up to
# 0.3 where a camera has interpolated colours. On steel neighbours have 0.36 at least.
_LEAST_CORRELATIONS = (0.3, 0.08, 0.08, 0.08)
_SIGMAS = 4.0  # of the correlation that chance gives on a small map
# gray values and deviations by which one cell must differ to show something on a plain ground
_PEAK = 5.0, 6.0
_LEAST_SIDE = 8  # cells, below which a map is judged by its deviation alone

Floats = NDArray[np.float32]


def is_blank(photo: Photo, area: Box) -> bool:
    """Whether there is nothing to see in an area of a frame, by its pixels alone."""
    return all(
        _is_plain(channel) or not (_has_peak(channel) or _is_correlated(channel))
        for channel in _map(photo, area)
    )


def _map(photo: Photo, area: Box) -> Iterator[Floats]:
    """The area's channels, averaged over square cells and without the falling off of light:
    [h, w] each.
    """
    left, top, width, height = area
    image = photo.image
    cell = max(1, round(math.sqrt(width * height) / _CELLS))
    if step := cell // _SAMPLES:  # between the pixels that are read
        sampled = max(1, width // step), max(1, height // step)
        image = image.resize(
            sampled, Image.Resampling.NEAREST, (left, top, left + width, top + height)
        )
        (left, top, width, height) = (0, 0, *sampled)
        cell = cell // step
    across = min(cell, width)
    down = min(cell, height)
    # Cells at an edge would be smaller, and noisier: whole ones only.
    whole = (left, top, left + width // across * across, top + height // down * down)
    cells = np.asarray(image.reduce((across, down), whole))
    planes = cells.reshape(*cells.shape[:2], -1)
    rows, columns, channels = planes.shape
    smooth = _smooth_surfaces(rows, columns)
    for channel in range(channels):
        values = planes[..., channel].astype(np.float32).ravel()
        yield (values - smooth @ (smooth.T @ values)).reshape(rows, columns)


@lru_cache(8)
def _smooth_surfaces(rows: int, columns: int) -> Floats:
    """An orthonormal basis [rows * columns, 6] of quadratic surfaces;
    on a small map of constants [..., 1].
    """
    y = np.repeat(np.linspace(-1, 1, rows), columns)
    x = np.tile(np.linspace(-1, 1, columns), rows)
    surfaces = [np.ones_like(x), x, y, x * x, x * y, y * y]
    kept = surfaces if min(rows, columns) >= _LEAST_SIDE else surfaces[:1]
    return np.linalg.qr(np.stack(kept, 1))[0].astype(np.float32)


def _is_plain(plane: Floats) -> bool:
    """Whether it varies too little to show anything, in one cell or in many."""
    return float(plane.std()) < _LEAST_DEVIATION and float(np.abs(plane).max()) < _PEAK[0]


def _has_peak(plane: Floats) -> bool:
    """Whether some cell differs more than noise ever does; or the map is too small to tell."""
    return min(plane.shape) < _LEAST_SIDE or float(np.abs(plane).max()) > max(
        _PEAK[0], _PEAK[1] * float(plane.std())
    )


def _is_correlated(plane: Floats) -> bool:
    """Whether cells tell of their neighbours, as likeness or as the repetition of a pattern."""
    chance = _SIGMAS / math.sqrt(plane.size)
    square = float(np.square(plane).mean())
    for lag, least in enumerate(_LEAST_CORRELATIONS, 1):
        for ahead, behind in ((plane[lag:], plane[:-lag]), (plane[:, lag:], plane[:, :-lag])):
            if abs(float((ahead * behind).mean())) > max(least, chance) * square:
                return True
    return False
