"""The first block of MobileNetV2 and EfficientNet-Lite0 with fewer and wider convolutions that compute the same."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

_LANES = 16  # channels that onnxruntime's depthwise int8 kernel takes at once; what is left over takes as long again
_KINDS = ["Conv", "Clip", "Conv", "Clip", "Conv", "Conv"]
_RELU6_MAX = 6  # of ReLU6


class _Start(NamedTuple):
    """An encoder's first nodes; between `narrow` and `wide` there is no activation."""

    first: NodeProto
    first_clip: NodeProto
    depthwise: NodeProto
    depthwise_clip: NodeProto
    narrow: NodeProto
    wide: NodeProto


class _Values:
    """A graph's initialisers, to read and to write."""

    def __init__(self, graph: GraphProto):
        self._named = {value.name: value for value in graph.initializer}

    def of(self, node: NodeProto) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """A convolution's weight and bias."""
        weight, bias = (numpy_helper.to_array(self._named[name]).astype(np.float64) for name in node.input[1:])
        return weight, bias

    def put(self, node: NodeProto, *arrays: NDArray[Any]) -> None:
        """Give it others."""
        for name, array in zip(node.input[1:], arrays, strict=True):
            value: TensorProto = self._named[name]
            value.CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))


def widen_first_block(graph: GraphProto, pixels: str, zero: int) -> None:
    """Let the encoders share the first block's convolutions of `pixels`, which are -zero..255-zero; others stay.

    This block is on the most places of all.
    The narrow convolution is multiplied into the wide one behind it, where it would be rounded for nothing. Channels
    whose activation no image can change, a quarter of ImageNet's, become part of a bias.
    """
    starts = [_match_start(graph, node) for node in _find_readers(graph, pixels)]
    found = [start for start in starts if start]
    if not found or len(found) < len(starts):
        return
    values = _Values(graph)
    weight, bias = (np.concatenate(each) for each in zip(*(values.of(start.first) for start in found), strict=True))
    deep, shift = (np.concatenate(each) for each in zip(*(values.of(each.depthwise) for each in found), strict=True))
    _, highest = _activation_range(weight, bias, -zero, 255 - zero)
    low, high = _activation_range(deep, shift, 0, highest[:, None, None, None])
    constant = np.flatnonzero(low == high)
    gone = constant[: len(constant) // _LANES * _LANES]
    keep = np.setdiff1d(np.arange(len(low)), gone)
    shared, begin = found[0], 0
    for start in found:
        (narrow, offset), (wide, wide_bias) = values.of(start.narrow), values.of(start.wide)
        product = np.zeros((len(wide), len(low)))
        product[:, begin : begin + narrow.shape[1]] = wide[:, :, 0, 0] @ narrow[:, :, 0, 0]
        begin += narrow.shape[1]
        wide_bias = wide_bias + wide[:, :, 0, 0] @ offset + product[:, gone] @ low[gone]
        values.put(start.wide, product[:, keep, None, None], wide_bias)
        start.wide.input[0] = shared.depthwise_clip.output[0]
        _remove_nodes(graph, start.narrow, *([] if start is shared else start[:4]))
    values.put(shared.first, weight[keep], bias[keep])
    values.put(shared.depthwise, deep[keep], shift[keep])
    next(each for each in shared.depthwise.attribute if each.name == "group").i = len(keep)


def _find_readers(graph: GraphProto, name: str) -> list[NodeProto]:
    return [node for node in graph.node if name in node.input]


def _match_start(graph: GraphProto, node: NodeProto) -> _Start | None:
    """The nodes from the first convolution on, if they are those of such a block."""
    nodes = [node]
    while len(nodes) < len(_KINDS) and len(readers := _find_readers(graph, nodes[-1].output[0])) == 1:
        nodes += readers
    if [node.op_type for node in nodes] != _KINDS:
        return None
    biased = all(len(node.input) == 3 for node in nodes)  # Clip's bounds are two, too; drawn BatchNorm leaves no bias
    return _Start(*nodes) if biased else None


def _activation_range(
    weight: NDArray[Any], bias: NDArray[Any], low: Any, high: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The least and the most that ReLU6 can give of each channel, of inputs low..high."""
    ends = weight * low, weight * high
    least, most = (np.clip(pick(*ends).sum((1, 2, 3)) + bias, 0, _RELU6_MAX) for pick in (np.minimum, np.maximum))
    return least, most


def _remove_nodes(graph: GraphProto, *nodes: NodeProto) -> None:
    """Remove nodes, and the weights and biases of those that are convolutions."""
    for node in nodes:
        graph.node.remove(node)
        for value in [value for value in graph.initializer if node.op_type == "Conv" and value.name in node.input]:
            graph.initializer.remove(value)
