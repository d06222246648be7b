"""Findings of an audit: how much of a plant's images is told, by which attack,
with the pictures that it made.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

What = Literal["counts", "membership", "pictures"]
Seen = Literal["model", "sums", "patches"]
Mode = Literal["open", "masked", "private"]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

MEANINGS: dict[What, str] = {
    "counts": "how many images there are of each class",
    "membership": "whether an image that somebody has is among them",
    "pictures": "what they look like",
}
SEEN: dict[Seen, str] = {
    "model": "the model it trains",
    "sums": "sums of features",
    "patches": "patches of maps",
}
MODES: dict[Mode, str] = {
    "open": "the coordinator reads each plant's contribution",
    "masked": "it reads sums of plants (--secure-aggregation)",
    "private": "noise hides each image (--privacy)",
}


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """What one attack tells of the plant's images."""

    what: What
    seen: Seen
    attack: str  # in words
    # its measure: agreement of counts, area under the ROC curve, SSIM; 1 is everything
    value: float
    chance: float  # of somebody who sees nothing
    low: float | None = None  # of an area: its 95 % interval
    high: float | None = None

    @property
    def told(self) -> float:
        """How much of what there is to tell: 0 at what one has who sees nothing, or less,
        and 1 at 1.
        """
        return self._told(self.value)

    @property
    def told_surely(self) -> float:
        """The same at the lower end of the interval, if there is one."""
        surely = self.value if self.low is None else self.low
        return self._told(surely)

    def _told(self, value: float) -> float:
        if value >= 1:
            return 1.0  # exactly, where a guess might have been as good
        return max(0.0, (value - self.chance) / (1 - self.chance)) if self.chance < 1 else 0.0


class Pictures(NamedTuple):
    """What an attack has made, each beside the plant's image that is most like it; uint8 [n,
    s, s, 3].
    """

    seen: Seen
    attack: str
    made: np.ndarray
    nearest: np.ndarray


class Found(NamedTuple):
    """What attacks on one observation have found."""

    exposures: tuple[Exposure, ...]
    pictures: tuple[Pictures, ...] = ()
    notes: tuple[str, ...] = ()
