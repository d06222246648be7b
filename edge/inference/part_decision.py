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


def no_defect_class(view: View, classes: Sequence[str]) -> str | None:
    """The class of a model that means no defect; None if it has none."""
    name = view.no_defect or NO_DEFECT
    return name if name in classes else None


def defect_threshold(view: View, classes: Sequence[str]) -> float:
    """The probability of a defect from which on a tile has one.

    Where calibrated probabilities say p, calling it a defect costs 1 - p false rejects on average,
    calling it good p * `missed_cost`: the threshold is where both are equal (Bayes). A model
    without a class for no defect finds defects only: unless the view has a threshold of confidence,
    each tile counts.
    """
    if view.threshold is not None:
        return view.threshold
    return 1 / (1 + view.missed_cost) if no_defect_class(view, classes) else 0.0


def check_no_defect_class(view: View, classes: Sequence[str]) -> None:
    """UsageError when the settings name a class that a model does not have,
    or a cost that cannot act.
    """
    if view.no_defect and view.no_defect not in classes:
        raise UsageError(
            f"[view] no_defect = {view.no_defect!r} is none of the model's classes "
            f"{', '.join(classes)}",
            f"{suggest(view.no_defect, classes)}, or leave it out",
        )
    if view.missed_cost != 1 and not no_defect_class(view, classes):
        raise UsageError(
            f"[view] missed_cost = {view.missed_cost:g} has no effect: none of the model's "
            "classes means no defect",
            "leave it out, or name that class by no_defect",
        )
    if view.missed_cost != 1 and view.threshold is not None:
        raise UsageError(
            f"[view] has both threshold = {view.threshold:g} and missed_cost = "
            f"{view.missed_cost:g}",
            "leave out one: the cost sets the threshold",
        )


def decide(
    probabilities: NDArray[np.float32], boxes: Sequence[Box], classes: Sequence[str], view: View
) -> Decision:
    """float32 [tiles, classes] -> the decision.

    A tile has a defect when the probability of one, which is all but that of the no-defect class,
    reaches the threshold; of a model without such a class, when the confidence of its likeliest
    class does. A part has one when `least_tiles` of its tiles have (or all of them, if it has
    fewer). The most confident of them decides. A part without a defect gets the no-defect class,
    with the confidence of the tile that is least sure of it; if the model has no such class, the
    label of its most confident tile.
    """
    no_defect = no_defect_class(view, classes)
    threshold = defect_threshold(view, classes)
    good = None if no_defect is None else list(classes).index(no_defect)
    found = []
    for box, row in zip(boxes, probabilities, strict=True):
        label = int(row.argmax())
        confidence = row[label] if good is None else 1 - row[good]
        defect = float(confidence) >= threshold
        if defect and label == good:
            label = max(
                (each for each in range(len(classes)) if each != good),
                key=lambda each: float(row[each]),
            )
        found.append(
            Tile(box=box, label=classes[label], confidence=float(row[label]), defect=defect)
        )
    shown = tuple(found) if len(found) > 1 else ()
    defects = [index for index, tile in enumerate(found) if tile.defect]
    if len(defects) >= min(view.least_tiles, len(found)):
        most_confident = max(defects, key=lambda index: found[index].confidence)
        return Decision(most_confident, found[most_confident].label, True, shown)
    if good is not None and no_defect is not None:
        return Decision(int(probabilities[:, good].argmin()), no_defect, False, shown)
    most_confident = max(range(len(found)), key=lambda index: found[index].confidence)
    return Decision(most_confident, found[most_confident].label, False, shown)
