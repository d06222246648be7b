"""Gate for a faster model in place of an exact one: the line's verdicts on held-out images,
and its time, here.
"""

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.inference.outcomes import Failure
from edge.inference.pipeline import Frame, Inspection, NullConsumer, Pipeline
from edge.inference.served_model import load_model
from trainer.data.class_folders import LabelledImages

# accuracy that may be lost, verdicts that must stay
MAX_ACCURACY_LOSS = 0.005
MIN_AGREEMENT = 0.99
_RUNS = 100
_WARM_UP = 10
# quantile of the runs that is compared: what else the machine does makes the others longer
_UNDISTURBED = 0.1


class Comparison(NamedTuple):
    """What a model is worth to the line against another one that it could replace."""

    images: int
    same: float  # share of images whose verdicts are the same
    accuracy: tuple[float, float]  # before and after
    milliseconds: tuple[float, float]  # an undisturbed frame's, from its pixels to its verdict

    @property
    def passed(self) -> bool:
        """Whether it is as right, and faster."""
        (right, right_after) = self.accuracy
        (slow, fast) = self.milliseconds
        return (
            right - right_after <= MAX_ACCURACY_LOSS and self.same >= MIN_AGREEMENT and fast < slow
        )

    def __str__(self) -> str:
        (right, right_after) = self.accuracy
        (slow, fast) = self.milliseconds
        return (
            f"{self.same:.1%} of {self.images} verdicts the same, accuracy {right:.1%} -> "
            f"{right_after:.1%}, {slow:.1f} -> {fast:.1f} ms"
        )


def compare_bundles(exact: Path, faster: Path, held_out: LabelledImages) -> Comparison:
    """Inspect held-out images by the line's pipeline with both bundles, in turns.

    A failure is a wrong verdict.

    A frame's time is all of the line's: the cut, the outputs that it asks for, the decision. A line
    that decodes files takes longer with both.

    Raises:
        BundleError: one fails its self-test.
    """
    lines = [Pipeline(load_model(folder), NullConsumer()) for folder in (exact, faster)]
    frames = [Frame(str(number), image) for number, image in enumerate(held_out.images)]
    labels = []
    for each_line in lines:
        labels.append([_label(each_line.inspect_sync(frame)) for frame in frames])
    verdicts = np.array(labels)
    seconds = np.empty((2, _RUNS))
    for turn in range(_WARM_UP + _RUNS):
        for which, line in enumerate(lines):
            start = time.perf_counter()
            line.inspect_sync(frames[turn % len(frames)])
            # what the first turns say is written over
            seconds[which, turn - _WARM_UP] = time.perf_counter() - start
    for line in lines:
        line.close()
    right = np.array(lines[0].model.manifest.classes)[held_out.labels]
    before, after = (verdicts == right).mean(1)
    slow, fast = np.quantile(seconds, _UNDISTURBED, axis=1) * 1000
    return Comparison(
        len(frames),
        float((verdicts[0] == verdicts[1]).mean()),
        (float(before), float(after)),
        (float(slow), float(fast)),
    )


def _label(found: Inspection | Failure) -> str:
    return "" if isinstance(found, Failure) else found.verdict.label
