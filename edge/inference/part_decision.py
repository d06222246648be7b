"""The decision: from the classes of a frame's tiles to one label for the part."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError, suggest
from edge.inference.outcomes import Box, Tile
from edge.inference.tiling import View

NO_DEFECT = "no_defect"  # the class that means so where the settings name none


class Decision(NamedTuple):
    """The label of a part, and the tile that decided it."""

    tile: int  # the one that decides
    label: str
    defect: bool
    tiles: tuple[Tile, ...]  # empty for a frame that is one tile


def check_no_defect_class(view: View, classes: Sequence[str]) -> None:
    """UsageError when the settings name a class that a model does not have."""
    if view.no_defect and view.no_defect not in classes:
        raise UsageError(
            f"[view] no_defect = {view.no_defect!r} is none of the model's classes {', '.join(classes)}",
            f"{suggest(view.no_defect, classes)}, or leave it out",
        )


def decide(probabilities: NDArray[np.float32], boxes: Sequence[Box], classes: Sequence[str], view: View) -> Decision:
    """float32 [tiles, classes] -> the decision.

    A tile has a defect when its likeliest class is one and reaches the threshold; a part has one when `least_tiles` of
    its tiles have (or all of them, if it has fewer). The most confident of them decides. A part without a defect gets
    the no-defect class, with the confidence of the tile that is least sure of it; if the model has no such class, the
    label of its most confident tile.
    """
    no_defect = view.no_defect or NO_DEFECT
    labels = probabilities.argmax(1)
    found = tuple(
        Tile(
            box=box,
            label=classes[label],
            confidence=float(row[label]),
            defect=classes[label] != no_defect and float(row[label]) >= view.threshold,
        )
        for box, label, row in zip(boxes, labels, probabilities, strict=True)
    )
    shown = found if len(found) > 1 else ()
    defects = [index for index, tile in enumerate(found) if tile.defect]
    if len(defects) >= min(view.least_tiles, len(found)):
        most_confident = max(defects, key=lambda index: found[index].confidence)
        return Decision(most_confident, found[most_confident].label, True, shown)
    if no_defect in classes:
        return Decision(int(probabilities[:, list(classes).index(no_defect)].argmin()), no_defect, False, shown)
    most_confident = max(range(len(found)), key=lambda index: found[index].confidence)
    return Decision(most_confident, found[most_confident].label, False, shown)
