"""Effects of decisions on accuracy: a surrogate for millions of steps, or a real federation in this process."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from research.dao_vfl.policies.learning_curve import Curve
from trainer.vfl.policies.latency import Ints
from trainer.vfl.simulation import Simulation

Learner = Callable[[Ints], float]  # E of the next round [K] -> accuracy after it, on validation data


class Surrogate:
    """A fitted curve's accuracy."""

    def __init__(self, curve: Curve):
        self._curve, self.progress = curve, 0.0

    def __call__(self, iterations: Ints) -> float:
        """Play a round."""
        self.progress += float(self._curve.step(iterations))
        return float(self._curve(self.progress))


class Played:
    """A real line's accuracy on validation products, which are of none of its rounds and not the test's either."""

    def __init__(self, line: Simulation, samples: Sequence[Tensor], labels: Tensor):
        self._line, self._samples, self._labels = line, samples, labels
        self._values = torch.arange(len(line.spec.classes), dtype=torch.float32)

    def __call__(self, iterations: Ints) -> float:
        """Play a round."""
        self._line.step(iterations.tolist())
        return accuracy(self._line, self._samples, self._labels)


def accuracy(line: Simulation, samples: Sequence[Tensor], labels: Tensor) -> float:
    """Share of right classes; where the mean is the result, 1 - RMSE / (C - 1) in steps of the C classes."""
    logits = line.predict(samples)
    if line.spec.reading == "class":
        return float((logits.argmax(1) == labels).double().mean())
    expected = logits.softmax(1) @ torch.arange(logits.shape[1], dtype=logits.dtype)
    return 1 - float((expected - labels).square().mean().sqrt()) / (logits.shape[1] - 1)
