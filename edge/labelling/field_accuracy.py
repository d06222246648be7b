"""Accuracy in service: what labels of randomly kept images say of a model,
beside what its bundle promised.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from edge.uncertainty.performance import Proportion


class FieldAccuracy(Struct, frozen=True, kw_only=True):
    """The share of a model's verdicts that people confirmed,
    among images that were kept at random.
    """

    accuracy: Proportion
    waiting: int  # such images without a label
    promise: Literal["kept", "missed", "exceeded"] | None  # None: the bundle promises nothing


def judge_field(
    right: Sequence[bool], waiting: int, promised: Proportion | None
) -> FieldAccuracy | None:
    """The accuracy of verdicts of which it is known whether they were right;
    None where there are none.

    The promise is missed or exceeded where the 95 % interval of the difference leaves out zero.
    """
    accuracy = Proportion.of(right)
    if accuracy is None:
        return None
    promise: Literal["kept", "missed", "exceeded"] | None = None
    if promised:
        low, high = accuracy.difference(promised)
        if high < 0:
            promise = "missed"
        elif low > 0:
            promise = "exceeded"
        else:
            promise = "kept"
    return FieldAccuracy(accuracy=accuracy, waiting=waiting, promise=promise)
