"""Grid of whole numbers on which masked contributions are summed;
an open sum on it comes to the same bytes.

A word of 32 bits holds a weighted difference from the round's broadcast. Differences are small, so
that 32 bits suffice where tensors themselves need 64. Statistics are whole numbers already, and
stay on their grid of 64 bits.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from broker_config.protocol.messages import Spec, TensorSpec
from broker_config.protocol.round_contents import MASKED_WEIGHT, is_statistics_round
from trainer.methods.base import Method
from trainer.models.named_tensors import Arrays

_BITS = 31  # of a sum, beside its sign
# A contribution of the largest weight may move a tensor by its first largest value, and tensors
# that start at zero (biases) by this; one of half the weight twice as far.
_SMALLEST = 2.0**-2
WEIGHT_BITS = 24


def scale_for(initial: np.ndarray, nodes: int) -> int:
    """The binary exponent in which differences of a tensor are summed over `nodes` nodes."""
    largest = max(float(np.abs(initial).max(initial=0.0)), _SMALLEST)
    return _BITS - math.ceil(math.log2(nodes)) - math.ceil(math.log2(largest))


def encode(
    tensors: Iterable[tuple[str, np.ndarray]],
    broadcast: Arrays,
    scales: Mapping[str, TensorSpec],
    nodes: int,
    weight: float,
) -> Arrays:
    """A contribution's words, uint32, and its weight among them.

    Args:
        tensors: float32, as trained.
        broadcast: what they were trained from.
        scales: of each tensor.
        nodes: how many contributions the scales leave room for.
        weight: what the contribution counts, as a share of the largest one, in (0, 1].
    """
    share = max(1, round(weight * 2**WEIGHT_BITS))
    most = 2 ** (_BITS - math.ceil(math.log2(nodes))) - 1
    words = {MASKED_WEIGHT: np.array(share, np.uint32)}
    for name, values in tensors:
        difference = values.astype(np.float64) - broadcast[name]
        steps = np.rint(difference * math.ldexp(share, scales[name].scale - WEIGHT_BITS))
        # What moves farther is cut: the next round begins where this one ends, and goes on from
        # there.
        words[name] = np.asarray(np.clip(steps, -most, most).astype(np.int32)).view(np.uint32)
    return words


def decode(
    sums: Mapping[str, np.ndarray], broadcast: Arrays, scales: Mapping[str, TensorSpec], count: int
) -> Arrays:
    """The weighted mean of `count` contributions, float32, from the sum of their words modulo 2^32.

    Raises:
        ValueError: so many contributions cannot have this sum of weights.
    """
    shares = int(sums[MASKED_WEIGHT])
    if not count <= shares <= count * 2**WEIGHT_BITS:
        raise ValueError(f"{count} contributions cannot have {shares} parts of weight")
    mean = {}
    for name, words in sums.items():
        if name == MASKED_WEIGHT:
            continue
        moved = np.ldexp(words.view(np.int32) / shares, WEIGHT_BITS - scales[name].scale)
        values = np.asarray(broadcast[name].astype(np.float64) + moved, np.float32)
        # A mean of variances is none below zero, but for the rounding of its parts.
        mean[name] = np.maximum(values, np.float32(0)) if name.endswith("running_var") else values
    return mean


def contribution_words(
    spec: Spec, method: Method, round_: int, tensors: Arrays, broadcast: Arrays, weight: float
) -> Arrays:
    """What a node contributes of its tensors and of the weight that it has measured,
    before any mask.
    """
    if is_statistics_round(spec, round_):
        return tensors
    counts = method.weigh(weight) / method.weight_cap
    return encode(tensors.items(), broadcast, spec.tensors, spec.nodes, counts)
