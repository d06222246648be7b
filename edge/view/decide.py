"""The classes of a frame's tiles -> one verdict for the part."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.verdict import Box, Tile
from edge.view.cut import View


class Decision(NamedTuple):
    """What the tiles come to."""

    tile: int  # the one that decides
    defect: bool
    tiles: tuple[Tile, ...]  # empty for a frame that is one tile


def decide(probabilities: NDArray[np.float32], boxes: Sequence[Box], classes: Sequence[str], view: View) -> Decision:
    """float32 [tiles, classes] -> the decision."""
    labels = probabilities.argmax(1)
    found = tuple(
        Tile(box=box, label=classes[label], confidence=float(row[label]), defect=classes[label] != view.no_defect)
        for box, label, row in zip(boxes, labels, probabilities, strict=True)
    )
    first = max(range(len(found)), key=lambda index: (found[index].defect, found[index].confidence))
    return Decision(first, found[first].defect, found if len(found) > 1 else ())
