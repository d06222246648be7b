"""Sizes of transformer encoders, shared by presets and networks. Does not import torch."""

from typing import NamedTuple


class Tel(NamedTuple):
    """Sizes of a transformer encoder."""

    width: int
    depth: int
    heads: int
    ratio: int  # of the blocks' hidden width to `width`


PAPER_TEL = Tel(1024, 10, 8, 4)
SMALL_TEL = Tel(128, 2, 4, 2)
