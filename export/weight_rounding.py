"""Rounding of weights to int8 with the least error of convolutions on images that trained the
model.
"""

from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from edge.inference.predictor import session_options

_LARGEST = 127  # of int8 weights, which are symmetric
_DAMPING = 1e-3  # of the inputs' mean square, against inputs that hardly vary


def round_weights(quantised: ModelProto, exact: ModelProto, images: NDArray[np.uint8]) -> None:
    """Round the weights of `quantised` again, and correct its biases by what is left of the
    error on average.

    `exact` is the same graph in fp32; images uint8 [n, S, S, 3].
    """
    weights = {value.name: numpy_helper.to_array(value) for value in exact.graph.initializer}
    values = {value.name: value for value in quantised.graph.initializer}
    nodes = [
        node
        for node in exact.graph.node
        if node.op_type == "Conv" and f"{node.input[1]}_quantized" in values
    ]
    for node, (squares, means) in zip(
        nodes, _collect_inputs(exact, nodes, weights, images), strict=True
    ):
        _, name, *bias = node.input
        weight = weights[name].reshape(len(squares), -1, squares.shape[2]).astype(np.float64)
        step = (
            numpy_helper.to_array(values[f"{name}_scale"])
            .astype(np.float64)
            .reshape(weight.shape[:2])
        )
        whole = round_to_steps(weight, step, squares)
        stored = values[f"{name}_quantized"]
        stored.CopyFrom(
            numpy_helper.from_array(whole.reshape(weights[name].shape).astype(np.int8), stored.name)
        )
        if bias:
            error = ((weight - whole * step[:, :, None]) @ means[:, :, None]).ravel()
            stored = values[f"{bias[0]}_quantized"]
            scale = values[f"{bias[0]}_quantized_scale"]
            corrected = numpy_helper.to_array(stored) + np.round(
                error / numpy_helper.to_array(scale)
            )
            stored.CopyFrom(numpy_helper.from_array(corrected.astype(np.int32), stored.name))


def _collect_inputs(
    model: ModelProto,
    nodes: list[NodeProto],
    weights: dict[str, NDArray[Any]],
    images: NDArray[np.uint8],
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Of each convolution's input patches, by group: mean products [groups, K,
    K] and means [groups, K].
    """
    watched = ModelProto()
    watched.CopyFrom(model)
    names = list(dict.fromkeys(node.input[0] for node in nodes))
    del watched.graph.output[:]
    for name in names:
        watched.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        )
    session = onnxruntime.InferenceSession(
        watched.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )
    found: list[Any] = [(0, 0)] * len(nodes)
    for image in images:
        seen = dict(zip(names, session.run(names, {"image": image[None]}), strict=True))
        for place, node in enumerate(nodes):
            patches = _extract_patches(seen[node.input[0]][0], node, weights[node.input[1]].shape)
            products = patches @ patches.transpose(0, 2, 1) / patches.shape[2]
            squares, means = found[place]
            found[place] = squares + products / len(images), means + patches.mean(2) / len(images)
    return [(squares.astype(np.float64), means.astype(np.float64)) for squares, means in found]


def _extract_patches(
    seen: NDArray[np.float32], node: NodeProto, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """What a convolution with weights of `shape` multiplies of its input [C, h, w]: [groups,
    K, places].
    """
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    top, left, bottom, right = given["pads"]
    down, across = given["strides"]
    padded = np.pad(seen, ((0, 0), (top, bottom), (left, right)))
    windows = sliding_window_view(padded, shape[2:], axis=(1, 2))[:, ::down, ::across].transpose(
        0, 3, 4, 1, 2
    )
    return windows.reshape(given["group"], -1, windows.shape[3] * windows.shape[4])


def round_to_steps(
    weight: NDArray[np.float64], step: NDArray[np.float64], squares: NDArray[np.float64]
) -> NDArray[Any]:
    """Weights [groups, O, K] in steps [groups, O], as whole numbers (GPTQ: Frantar et al. 2023).

    Input by input: what rounding one weight does to the output, the weights of the inputs that
    follow make up for, as far as these go with it.
    """
    count = weight.shape[2]
    damping = _DAMPING * np.einsum("gkk->g", squares) / count + 1e-9
    inverse = np.linalg.inv(squares + damping[:, None, None] * np.eye(count))
    factor = np.linalg.cholesky(inverse).transpose(0, 2, 1)
    rest = weight.copy()
    whole = np.empty_like(weight)
    for place in range(count):
        whole[:, :, place] = np.clip(np.round(rest[:, :, place] / step), -_LARGEST, _LARGEST)
        error = (rest[:, :, place] - whole[:, :, place] * step) / factor[:, None, place, place]
        rest[:, :, place:] -= error[:, :, None] * factor[:, None, place, place:]
    return whole
