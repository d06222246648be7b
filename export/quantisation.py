"""fp32 graphs -> int8: static, QDQ, weights per channel,
activations calibrated on images that trained the model.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from export.weight_rounding import round_weights
from trainer.seeding import generator

MAX_CALIBRATION_IMAGES = 256
# Largest difference of golden probabilities. Integer sums are the same everywhere, but the rounding
# after them can differ by a step of 256 where another processor's kernels, or a later onnxruntime,
# fuse other nodes.
TOLERANCE = 0.1
_OPERATORS = ["Conv", "Clip", "Relu", "MaxPool", "Add"]
_PRODUCTS = ["MatMul", "Gemm"]
# smaller matrices cost little, and distances between vectors need full precision
_MIN_QUANTISED_WEIGHTS = 1 << 14
_ROUNDING_IMAGES = 64  # enough for rounding weights


def quantise(graph: bytes, images: NDArray[np.uint8]) -> bytes:
    """The graph in int8, calibrated on images uint8 [n, S, S, 3], of which at most
    MAX_CALIBRATION_IMAGES are taken.

    Encoders are quantised; the rest costs little and stays fp32. In transformers only products with
    large weight matrices are quantised: not sums, LayerNorm, softmax and GELU, nor the products of
    two activations, whose range varies between images. Images enter as the integers that they are.
    """
    model = onnx.load_from_string(graph)
    pixels, zero = _unify_mean(model.graph)
    # outdated shapes, and the tracer's own, in which scalars have a dimension
    del model.graph.value_info[:]
    chosen = np.sort(generator(0, "calibration").permutation(len(images))[:MAX_CALIBRATION_IMAGES])
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.onnx"
        quantised = Path(folder) / "int8.onnx"
        # Optimisation would remove a temperature of 1; symbolic shape inference fails on a token
        # expanded to the batch.
        quant_pre_process(model, exact, skip_optimization=True, skip_symbolic_shape=True)
        quantize_static(
            exact,
            quantised,
            _Images(images[chosen]),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_OPERATORS + _PRODUCTS,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=_find_exact_nodes(model.graph),
            extra_options={
                "TensorQuantOverrides": {
                    pixels: [{"scale": np.array(1, np.float32), "zero_point": zero}]
                },
                "OpTypesToExcludeOutputQuantization": _PRODUCTS,  # they are summed in fp32
            },
        )
        model = onnx.load(quantised)
        round_weights(model, onnx.load(exact), images[chosen[:_ROUNDING_IMAGES]])
    _feed_integers(model.graph, pixels)
    _separate_readers(model.graph)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _find_exact_nodes(graph: GraphProto) -> list[str]:
    """Names of the nodes that stay fp32.

    From the first matrix product on, these are all but the products with large weight matrices that
    features depend on.
    """
    many = {
        value.name for value in graph.initializer if np.prod(value.dims) >= _MIN_QUANTISED_WEIGHTS
    }
    needed = {"features"}
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
    behind: set[str] = set()
    exact = []
    for node in graph.node:
        product = node.op_type in _PRODUCTS
        if product or behind.intersection(node.input):
            behind.update(node.output)
            if product and many.intersection(node.input[1:]) and needed.intersection(node.output):
                continue
            exact.append(node.name)
        elif "features" in node.output:
            exact.append(node.name)
    return exact


class _Images(CalibrationDataReader):  # type: ignore[misc]
    """Calibration images, one at a time."""

    def __init__(self, images: NDArray[np.uint8]):
        self._images = iter(images[:, None])

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        """The next inputs, or None at the end."""
        image = next(self._images, None)
        return None if image is None else {"image": image}


def _unify_mean(graph: GraphProto) -> tuple[str, NDArray[np.uint8]]:
    """Subtract one whole number from all channels, so that it is their zero point,
    and correct biases for it.

    Results differ a little from the exported graph at the border only, which is padded with that
    number.

    Returns:
        The name of the difference, and the number.
    """
    values = {value.name: value for value in graph.initializer}
    subtract = next(node for node in graph.node if "channel_mean" in node.input)
    mean = numpy_helper.to_array(values["channel_mean"])
    zero = np.array(mean.mean().round(), np.uint8)
    _set_value(values["channel_mean"], np.full_like(mean, zero))
    for node in graph.node:
        if subtract.output[0] in node.input:
            _, weight, *bias = (values.get(name) for name in node.input)
            missing = (
                (numpy_helper.to_array(weight) * (zero - mean)).sum((1, 2, 3)).astype(np.float32)
            )
            if bias:
                _set_value(bias[0], numpy_helper.to_array(bias[0]) + missing)
            else:  # it was zero
                node.input.append(f"{node.input[1]}_shift")
                graph.initializer.append(numpy_helper.from_array(missing, node.input[2]))
    return subtract.output[0], zero


def _set_value(value: TensorProto, array: NDArray[np.float32]) -> None:
    value.CopyFrom(numpy_helper.from_array(array.astype(np.float32), value.name))


def _feed_integers(graph: GraphProto, pixels: str) -> None:
    """Remove the nodes that convert pixels to floats,
    subtract their zero and quantise them again: a round trip.
    """
    made_by = {}
    for producer in graph.node:
        for output in producer.output:
            made_by[output] = producer
    quantise = next(
        node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == pixels
    )
    subtract = made_by[pixels]
    cast = made_by[subtract.input[0]]
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == quantise.output[0]:
                node.input[place] = cast.input[0]
    for node in (quantise, subtract, cast):
        graph.node.remove(node)
    graph.initializer.remove(
        next(value for value in graph.initializer if value.name == subtract.input[1])
    )


def _separate_readers(graph: GraphProto) -> None:
    """Give every reader of int8 weights a copy of its own;
    a head and the maps of two encoders share theirs.

    On processors without VNNI, onnxruntime (1.31) converts weights to unsigned once for each
    reader, and fails to load a graph where that makes two of one name.
    """
    values = {value.name: value for value in graph.initializer}
    int8 = {name for name, value in values.items() if value.data_type == TensorProto.INT8}
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        given = (
            node.output[0] if node.op_type == "DequantizeLinear" and node.input[0] in int8 else None
        )
        readers = []
        for each in graph.node:
            for position, read in enumerate(each.input):
                if read == given:
                    readers.append((each, position))
        for number, (reader, place) in enumerate(readers[1:], 1):
            (own := NodeProto()).CopyFrom(node)
            own.name = f"{node.name}_{number}"
            own.output[0] = f"{node.output[0]}_{number}"
            for which, name in enumerate(node.input):
                own.input[which] = f"{name}_{number}"
                graph.initializer.append(
                    numpy_helper.from_array(numpy_helper.to_array(values[name]), own.input[which])
                )
            reader.input[place] = own.output[0]
            nodes.append(own)
    del graph.node[:]
    graph.node.extend(nodes)
