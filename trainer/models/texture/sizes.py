"""Sizes that presets and networks share. Free of torch."""

from typing import NamedTuple


class Tel(NamedTuple):
    """Of a transformer encoder."""

    width: int
    depth: int
    heads: int
    ratio: int  # hidden width of its blocks' perceptrons over `width`


PAPER_TEL = Tel(1024, 10, 8, 4)
SMALL_TEL = Tel(128, 2, 4, 2)
