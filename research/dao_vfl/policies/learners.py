"""Effects of decisions on accuracy: a surrogate for millions of steps,
or a real federation in this process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edge_node.extensions.vfl.policies.latency import Ints
from edge_node.extensions.vfl.simulation import Simulation
from research.dao_vfl.policies.learning_curve import Curve

# E of the next round [K] -> accuracy after it, on validation data
Learner = Callable[[Ints], float]


class Surrogate:
    """A fitted curve's accuracy."""

    def __init__(self, curve: Curve):
        self._curve, self.progress = curve, 0.0

    def __call__(self, iterations: Ints) -> float:
        """Play a round."""
        self.progress += float(self._curve.step(iterations))
        return float(self._curve(self.progress))


class Played:
    """A real federation's accuracy on validation products,
    which are in none of its rounds nor in the test.
    """

    def __init__(self, simulation: Simulation, samples: Sequence[Tensor], labels: Tensor):
        self._simulation, self._samples, self._labels = simulation, samples, labels
        self._values = torch.arange(len(simulation.spec.classes), dtype=torch.float32)

    def __call__(self, iterations: Ints) -> float:
        """Play a round."""
        self._simulation.step(iterations.tolist())
        return accuracy(self._simulation, self._samples, self._labels)


def accuracy(simulation: Simulation, samples: Sequence[Tensor], labels: Tensor) -> float:
    """Share of right classes; where the mean is the result, 1 - RMSE /
    (C - 1) in steps of the C classes.
    """
    logits = simulation.predict(samples)
    if simulation.spec.reading == "class":
        return float((logits.argmax(1) == labels).double().mean())
    expected = logits.softmax(1) @ torch.arange(logits.shape[1], dtype=logits.dtype)
    return 1 - float((expected - labels).square().mean().sqrt()) / (logits.shape[1] - 1)
