"""Gate for a faster graph in place of an exact one: measured on this machine, on held-out images."""

import time
from typing import NamedTuple

import numpy as np
import onnxruntime

from edge.inference.predictor import session_options
from trainer.data.class_folders import LabelledImages

MAX_ACCURACY_LOSS, MIN_AGREEMENT = 0.005, 0.99  # accuracy that may be lost, verdicts that must stay
_RUNS, _WARM_UP = 100, 10
_UNDISTURBED = 0.1  # quantile of the runs that is compared: what else the machine does makes the others longer


class GraphComparison(NamedTuple):
    """What a graph is worth against another one that it could replace."""

    images: int
    same: float  # share of images whose verdicts are the same
    accuracy: tuple[float, float]  # before and after
    milliseconds: tuple[float, float]  # an undisturbed run of one image

    @property
    def passed(self) -> bool:
        """Whether it is as right, and faster."""
        (right, right_after), (slow, fast) = self.accuracy, self.milliseconds
        return right - right_after <= MAX_ACCURACY_LOSS and self.same >= MIN_AGREEMENT and fast < slow

    def __str__(self) -> str:
        (right, right_after), (slow, fast) = self.accuracy, self.milliseconds
        return (
            f"{self.same:.1%} of {self.images} verdicts the same, accuracy {right:.1%} -> {right_after:.1%}, "
            f"{slow:.1f} -> {fast:.1f} ms"
        )


def compare_graphs(exact: bytes, faster: bytes, held_out: LabelledImages) -> GraphComparison:
    """Measure both graphs, in turns, as the line runs them."""
    sessions = [
        onnxruntime.InferenceSession(graph, session_options(), providers=["CPUExecutionProvider"])
        for graph in (exact, faster)
    ]
    verdicts = [predict_classes(session, held_out.images) for session in sessions]
    seconds = np.empty((2, _RUNS))
    for turn in range(_WARM_UP + _RUNS):
        for which, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(["probabilities"], {"image": held_out.images[turn % len(held_out.images)][None]})
            seconds[which, turn - _WARM_UP] = time.perf_counter() - start  # what the first turns say is written over
    before, after = ((each == held_out.labels).mean() for each in verdicts)
    slow, fast = np.quantile(seconds, _UNDISTURBED, axis=1) * 1000
    return GraphComparison(
        len(held_out.labels),
        float((verdicts[0] == verdicts[1]).mean()),
        (float(before), float(after)),
        (float(slow), float(fast)),
    )


def predict_classes(session: onnxruntime.InferenceSession, images: np.ndarray) -> np.ndarray:
    """The likeliest class of each image uint8 [n, S, S, 3], [n]."""
    answers = [session.run(["probabilities"], {"image": images[start : start + 1]})[0] for start in range(len(images))]
    return np.asarray(np.concatenate(answers).argmax(1))
