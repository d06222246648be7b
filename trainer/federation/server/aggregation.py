"""Exact sums of contributions: the result depends on what was contributed, not on when it arrived.

Memory is one sum, however many nodes contribute.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from broker_config.protocol.messages import TensorSpec

_HEADROOM = 12  # bits: how far a tensor may grow beyond its initial largest value before it is refused
_SMALLEST = 2.0**-2  # tensors that start at zero (biases) get the headroom above this
_WEIGHT_BITS = 24


def scale_for(initial: np.ndarray, nodes: int) -> int:
    """The binary exponent in which `nodes` contributions to a tensor are summed without overflow of 63 bits."""
    largest = max(float(np.abs(initial).max(initial=0.0)), _SMALLEST)
    return 62 - math.ceil(math.log2(nodes)) - (_HEADROOM + math.ceil(math.log2(largest)))


def largest(tensor: TensorSpec, nodes: int) -> float:
    """The largest value that one of `nodes` contributions to a tensor may hold."""
    return float(2.0 ** (62 - tensor.scale) / 2 ** math.ceil(math.log2(nodes)))


class FixedPointSum:
    """Sum of weight * tensor and of weights, in 64-bit integers.

    Args:
        tensors: shape and scale of each tensor that is summed.
        nodes: how many contributions the scales leave room for.
        weight_cap: the largest weight.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], nodes: int, weight_cap: float):
        self._tensors, self._nodes, self._weight_cap = tensors, nodes, weight_cap
        self._sums = {name: np.zeros(spec.shape, np.int64) for name, spec in tensors.items()}
        self._weight = 0
        self.count = 0

    def validate(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Read through a contribution, tensor by tensor.

        Raises:
            ValueError: a value is beyond the range that the federation's scales leave.
        """
        for name, values in tensors:
            bound = largest(self._tensors[name], self._nodes)
            if values.size and not float(np.abs(values).max()) <= bound:
                raise ValueError(f"tensor {name} holds a value beyond +-{bound:g}; its training has diverged")

    def add(self, tensors: Iterable[tuple[str, np.ndarray]], weight: float) -> None:
        """Add one contribution that passed `validate`, with a weight in (0, weight_cap]."""
        share = max(1, round(weight / self._weight_cap * 2**_WEIGHT_BITS))
        for name, values in tensors:
            # 24 bits of float32 times 24 bits of weight are exact in float64; rint is the only rounding.
            product = values.astype(np.float64) * math.ldexp(share, self._tensors[name].scale - _WEIGHT_BITS)
            self._sums[name] += np.rint(product).astype(np.int64)
        self._weight += share
        self.count += 1

    def mean(self) -> dict[str, np.ndarray]:
        """The weighted mean of each tensor, float32."""
        return {
            name: np.asarray(np.ldexp(total / self._weight, _WEIGHT_BITS - self._tensors[name].scale), np.float32)
            for name, total in self._sums.items()
        }


class IntegerSum:
    """Sum of int64 tensors as they are.

    Args:
        tensors: shape of each tensor that is summed.
        nodes: how many contributions there may be; their sum cannot overflow.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], nodes: int):
        self._bound = (2**63 - 1) // nodes
        self.totals = {name: np.zeros(spec.shape, np.int64) for name, spec in tensors.items()}

    def validate(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Read through a contribution, tensor by tensor.

        Raises:
            ValueError: a value is so large that as many contributions of its size would overflow.
        """
        for name, values in tensors:
            if values.size and not (-self._bound <= values.min() and values.max() <= self._bound):
                raise ValueError(f"tensor {name} holds a value beyond +-{self._bound}, its share of 63 bits")

    def add(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Add one contribution that passed `validate`."""
        for name, values in tensors:
            self.totals[name] += values
