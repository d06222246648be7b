"""Exact sums of contributions: the result depends on what was contributed, not on when it arrived.

Memory is one sum, however many nodes contribute. A contribution's weight and updates can be limited
to what most have.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from broker_config.protocol.messages import Spec, TensorSpec
from trainer.federation.server.robust_rules import Source
from trainer.models.named_tensors import Arrays

# bits: how far a tensor may grow beyond its initial largest value before it is refused
HEADROOM = 12
_SMALLEST = 2.0**-2  # tensors that start at zero (biases) get the headroom above this
WEIGHT_BITS = 24


def scale_for(initial: np.ndarray, nodes: int) -> int:
    """The binary exponent in which `nodes` contributions to a tensor are summed without overflow
    of 63 bits.
    """
    largest = max(float(np.abs(initial).max(initial=0.0)), _SMALLEST)
    return 62 - math.ceil(math.log2(nodes)) - (HEADROOM + math.ceil(math.log2(largest)))


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
        self._tensors = tensors
        self._nodes = nodes
        self._weight_cap = weight_cap
        self._sums = {name: np.zeros(spec.shape, np.int64) for name, spec in tensors.items()}
        self._weight = 0

    def validate(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Read through a contribution, tensor by tensor.

        Raises:
            ValueError: a value is beyond the range that the federation's scales leave.
        """
        for name, values in tensors:
            bound = largest(self._tensors[name], self._nodes)
            if values.size and not float(np.abs(values).max()) <= bound:
                raise ValueError(
                    f"tensor {name} holds a value beyond +-{bound:g}; its training has diverged"
                )

    def add(self, tensors: Iterable[tuple[str, np.ndarray]], weight: float) -> None:
        """Add one contribution that passed `validate`, with a weight in (0, weight_cap]."""
        share = max(1, round(weight / self._weight_cap * 2**WEIGHT_BITS))
        for name, values in tensors:
            # 24 bits of float32 times 24 bits of weight are exact in float64; rint is the only
            # rounding.
            product = np.array(values, np.float64)
            product *= math.ldexp(share, self._tensors[name].scale - WEIGHT_BITS)
            np.rint(product, out=product)
            self._sums[name] += product.astype(np.int64)
        self._weight += share

    def mean(self) -> dict[str, np.ndarray]:
        """The weighted mean of each tensor, float32."""
        return {
            name: np.asarray(
                total / self._weight * 2.0 ** (WEIGHT_BITS - self._tensors[name].scale), np.float32
            )
            for name, total in self._sums.items()
        }


class Influence(NamedTuple):
    """How far a contribution can move a weighted mean."""

    weight: float
    norms: Mapping[str, float]  # of each tensor's update, its difference from the broadcast


def measure_updates(
    tensors: Iterable[tuple[str, np.ndarray]], broadcast: Arrays
) -> dict[str, float]:
    """The Euclidean norm of each tensor's difference from the broadcast's."""
    norms = {}
    for name, values in tensors:
        # In rows, however they lie in memory: the rounding of numpy's sum depends on it.
        update = np.ravel(values.astype(np.float64) - broadcast[name])
        norms[name] = math.sqrt(np.square(update, out=update).sum())
    return norms


class Limits(NamedTuple):
    """What of a contribution counts."""

    weight: float
    shares: Mapping[str, float]  # of each tensor's update, 0..1

    def counted(self, influence: Influence) -> dict[str, float]:
        """How much of a contribution counts, 0..1: of its weight,
        and of its update's length over all tensors.
        """
        kept = math.hypot(*(share * influence.norms[name] for name, share in self.shares.items()))
        length = math.hypot(*influence.norms.values())
        update = kept / length if length else 1.0
        return {"weight": self.weight / influence.weight, "update": update}

    def clip(
        self, tensors: Iterable[tuple[str, np.ndarray]], broadcast: Arrays
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors, their updates shortened.

        They lie between both, so that variances stay non-negative.
        """
        for name, values in tensors:
            if (share := self.shares[name]) < 1:
                clipped = (1 - share) * broadcast[name].astype(np.float64) + share * values.astype(
                    np.float64
                )
                yield name, clipped.astype(np.float32)
            else:
                yield name, values


def limit(influences: Mapping[str, Influence]) -> dict[str, Limits]:
    """Limits of each contribution: the median of all weights and, tensor by tensor,
    the median norm of all updates.

    A median is no larger than the largest honest value as long as fewer than half of the nodes lie.
    Of fewer than three contributions it promises nothing, and there are no limits.
    """
    names = sorted(next(iter(influences.values())).norms)
    weights = np.array([each.weight for each in influences.values()])
    collected_norms = []
    for each in influences.values():
        collected_norms.append([each.norms[name] for name in names])
    norms = np.array(collected_norms)
    shares = np.ones_like(norms)
    if len(influences) >= 3:
        longest = np.median(norms, axis=0)
        np.divide(longest, norms, out=shares, where=norms > longest)
        weights = np.minimum(weights, np.median(weights))
    return {
        node: Limits(weight, dict(zip(names, row, strict=True)))
        for node, weight, row in zip(influences, weights.tolist(), shares.tolist(), strict=True)
    }


def clipped_mean(
    sums: FixedPointSum,
    sources: Mapping[str, Source],
    influences: Mapping[str, Influence],
    broadcast: Arrays,
) -> tuple[Arrays, dict[str, dict[str, float]]]:
    """The weighted mean of contributions, each within the limits that `limit` sets;
    and how much of each counts.

    Args:
        sums: into which they are added; empty.
        sources: the contributions that passed `validate`, by node.
        influences: of each, as measured before; weights in (0, weight_cap].
        broadcast: the tensors that they were trained from; others are left out.
    """
    limits = limit(influences)
    for node, each in limits.items():
        sent = ((name, values) for name, values in sources[node].tensors() if name in broadcast)
        sums.add(each.clip(sent, broadcast), each.weight)
    return sums.mean(), {node: each.counted(influences[node]) for node, each in limits.items()}


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
                raise ValueError(
                    f"tensor {name} holds a value beyond +-{self._bound}, its share of 63 bits"
                )

    def add(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Add one contribution that passed `validate`."""
        for name, values in tensors:
            self.totals[name] += values


def after_training(
    spec: Spec,
    settle: Callable[[Arrays, Arrays], Arrays] | None,
    round_: int,
    first: Callable[[], Arrays],
    broadcast: Arrays,
) -> Arrays:
    """Return what nodes receive after a round.

    Args:
        spec: of the run.
        settle: of its method.
        round_: that was closed.
        first: reads the run's first broadcast.
        broadcast: what the round made.
    """
    if settle is None or round_ != spec.rounds - bool(spec.statistics):
        return broadcast
    return settle(first(), broadcast)


def with_totals(
    spec: Spec,
    begin: Callable[[Arrays, Arrays], Arrays] | None,
    broadcast: Arrays,
    totals: Arrays,
) -> Arrays:
    """Return the broadcast that follows a round of statistics.

    `begin` makes what training begins with of it; None after training.
    """
    if begin is None:
        return {**broadcast, **totals}
    begun = begin(broadcast, totals)
    return {**begun, **totals} if spec.first_totals else begun
