"""Tiling: from a frame's region of interest to images of the network's size."""

from itertools import product
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from edge.inference.image_decoding import ImageError, Photo
from edge.inference.outcomes import Box

MAX_TILES = 512  # of one frame: 77 MB at 224 pixels


class View(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[view]` of a line's settings: which part of a frame is inspected,
    in which tiles, what is a defect.
    """

    # left, top, width, height in pixels; None: the whole frame
    roi: tuple[int, int, int, int] | None = None
    # side of a tile in the frame's pixels; 0: the region as a whole
    tile: Annotated[int, Meta(ge=0)] = 0
    overlap: Annotated[float, Meta(ge=0, le=0.9)] = 0.25  # of a tile with the next one
    # the class that means no defect; None: "no_defect", if the model has it
    no_defect: str | None = None
    # of a missed defect, in false rejects: sets the threshold
    missed_cost: Annotated[float, Meta(gt=0)] = 1.0
    # probability from which on a tile counts as a defect
    threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    least_tiles: Annotated[int, Meta(ge=1)] = 1  # tiles with a defect that make the part defective


class TiledFrame(NamedTuple):
    """A frame as the network sees it."""

    pixels: NDArray[np.uint8]  # [tiles, size, size, 3], RGB
    boxes: tuple[Box, ...]  # where each tile lies in the frame
    photo: Photo


def cut_tiles(photo: Photo, view: View, size: int, name: str = "the image") -> TiledFrame:
    """Cut a frame into tiles, row by row, each resized to the network's size as `Photo.resize`
    does it.

    ImageError, which names the frame `name`, when the region of interest is not inside it, or has
    too many tiles.
    """
    boxes = tile_boxes(region_of_interest(photo.image.size, view, name), view, name)
    pixels = np.empty((len(boxes), size, size, 3), np.uint8)
    for each, box in zip(pixels, boxes, strict=True):
        each[:] = photo.crop(box).resize(size)
    return TiledFrame(pixels, boxes, photo)


def region_of_interest(size: tuple[int, int], view: View, name: str = "the image") -> Box:
    """The part of a frame of this width and height that is inspected;
    ImageError when it is not inside the frame.
    """
    found = Box(*view.roi) if view.roi else Box(0, 0, *size)
    left, top, width, height = found
    if (
        min(left, top) < 0
        or min(width, height) < 1
        or left + width > size[0]
        or top + height > size[1]
    ):
        raise ImageError(
            f"{name} has {size[0]} x {size[1]} pixels, where the region of interest "
            f"{list(found)} does not lie",
            "set roi = [left, top, width, height] in [view] as it suits this camera's frames",
        )
    return found


def tile_boxes(area: Box, view: View, name: str = "the image") -> tuple[Box, ...]:
    """The tiles that cover an area, row by row; ImageError when they are more than MAX_TILES.

    All have one size: `view.tile`, or the area's own width or height where that is less. The last
    column and the last row are moved inwards.
    """
    width, height = (min(view.tile or side, side) for side in (area.width, area.height))
    columns = _starts(area.width, width, view.overlap)
    rows = _starts(area.height, height, view.overlap)
    if len(columns) * len(rows) > MAX_TILES:
        raise ImageError(
            f"{name} makes {len(columns) * len(rows)} tiles, more than {MAX_TILES}",
            "set a larger tile, a smaller overlap or a smaller roi in [view]",
        )
    return tuple(
        Box(area.left + left, area.top + top, width, height) for top, left in product(rows, columns)
    )


def _starts(length: int, tile: int, overlap: float) -> list[int]:
    """Where tiles begin along one side."""
    step = max(1, round(tile * (1 - overlap)))
    return [*range(0, length - tile, step), length - tile]
