"""A bundle small enough to be built in a test:
the mean color of an image decides between three classes.

With extras it has two encoders that it weighs alike: `received` sees the left half of an image,
`own` the right half.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from broker_config.protocol.messages import Aggregation, Preprocessing, RecordHead, Training
from edge.bundle import bundle_format

CLASSES = ("red", "green", "blue")
SHARPNESS = 10.0
CELLS = 4  # of its class activation maps, a side
PROVENANCE = bundle_format.Provenance(
    rounds=30,
    options={"lambda": 0.5},
    training=Training(learning_rate=0.01, batch_size=16),
    preprocessing=Preprocessing(size=96),
    head="trained",
    seed=7,
    nodes=5,
    quorum=4,
    aggregation=Aggregation(rule="multi_krum"),
    tested={"red": (19, 20), "green": (1, 4)},
    software={"edge-node": "0.2.0", "torch": "2.0"},
    record=RecordHead(entries=32, digest="c" * 64),
)


def _measured(verdicts: NDArray[np.int64]) -> bundle_format.Confidence:
    """A calibration on as many images of each class, which get these verdicts without a doubt."""
    labels = np.arange(len(verdicts)) % len(CLASSES)
    probabilities = np.eye(len(CLASSES))[verdicts] * 0.7 + 0.1
    held_out = bundle_format.HeldOut.of(labels, probabilities, np.ones(len(labels), bool))
    return bundle_format.Confidence(images=len(labels), held_out=held_out)


MEASURED = _measured(np.arange(90) % len(CLASSES))  # of a model that is always right
NEAR_GUESSING = _measured(np.zeros(90, np.int64))  # of one that always names the first class


def tiny_bundle(
    folder: Path,
    *,
    size: int = 16,
    node: str = "tiny",
    round_: int = 1,
    federation: str = "test",
    run: str = "0" * 16,
    signing: bundle_format.Signing | None = None,
    classes: tuple[str, str, str] = CLASSES,
    extras: bool = False,
    confidence: bundle_format.Confidence | None = None,
    reference: bytes | None = None,
    trained: Mapping[str, int] = MappingProxyType({}),
    trained_on: tuple[str, ...] = (),
    provenance: bundle_format.Provenance | None = None,
    graph: bytes | None = None,
) -> bundle_format.Bundle:
    """Write and read back a bundle whose golden probabilities are computed in numpy,
    without onnxruntime.

    `extras` gives it opinions, features and maps; `size` is then a multiple of CELLS. `graph` takes
    the place of `tiny_onnx`.
    """
    description = bundle_format.Description(
        federation=federation,
        run=run,
        node=node,
        method="none",
        model="mean-color",
        round=round_,
        classes=classes,
        trained=dict(trained),
        trained_on=trained_on,
        input=bundle_format.Input(size=size),
        extras=("opinions", "features", "maps") if extras else (),
        encoders=("received", "own") if extras else (),
        confidence=confidence,
        provenance=provenance,
    )
    golden = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    probabilities = tuple(tiny_probabilities(golden[None])[0])
    bundle_format.write_bundle(
        folder,
        description,
        tiny_onnx(size, extras) if graph is None else graph,
        golden,
        probabilities,
        signing,
        reference,
    )
    return bundle_format.read_bundle(folder)


def tiny_probabilities(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What the graph computes: softmax(SHARPNESS * mean color / 255), uint8 [N, S, S,
    3] -> [N, 3].
    """
    powers = np.exp(SHARPNESS * images.mean((1, 2)) / 255)
    return powers / powers.sum(1, keepdims=True)


def tiny_onnx(size: int, extras: bool = False) -> bytes:
    """The graph, with a dynamic batch."""
    nodes = [
        helper.make_node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["float"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Mul", ["mean", "scale"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    outputs = [
        helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", len(CLASSES)])
    ]
    values = [numpy_helper.from_array(np.float32(SHARPNESS / 255), "scale")]
    if extras:
        nodes += _extra_nodes(size // CELLS)
        shapes: dict[str, list[int]] = {
            "features": [len(CLASSES)],
            "opinions": [2, len(CLASSES)],
            "maps": [2, len(CLASSES), CELLS, CELLS],
        }
        outputs += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shapes[name]])
            for name in shapes
        ]
        halves = np.zeros((2, 1, 1, CELLS), np.float32)
        # what a half sees counts twice, so it is fused
        halves[0, ..., : CELLS // 2] = halves[1, ..., CELLS // 2 :] = 2
        values += [
            numpy_helper.from_array(halves, "halves"),
            numpy_helper.from_array(np.array([1]), "encoder"),
        ]
    graph = helper.make_graph(
        nodes,
        "mean-color",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", size, size, 3])],
        outputs,
        values,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def looping_onnx(size: int, brighter: float) -> bytes:
    """As `tiny_onnx`, but it computes for ever once a mean color is `brighter` than this."""
    boolean, real = TensorProto.BOOL, TensorProto.FLOAT
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Mul", ["before", "one"], ["after"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", boolean, []),
            helper.make_tensor_value_info("before", real, None),
        ],
        [
            helper.make_tensor_value_info("goes_on", boolean, []),
            helper.make_tensor_value_info("after", real, None),
        ],
        [numpy_helper.from_array(np.float32(1), "one")],
    )
    return _changed_onnx(
        size,
        [
            helper.make_node("ReduceMax", ["mean"], ["most"], keepdims=0),
            helper.make_node("Greater", ["most", "brighter"], ["loops"]),
            helper.make_node("Loop", ["", "loops", "logits"], ["changed"], body=body),
        ],
        [numpy_helper.from_array(np.float32(brighter), "brighter")],
    )


def greedy_onnx(size: int, numbers: int) -> bytes:
    """As `tiny_onnx`, but it takes memory for so many float32 numbers."""
    return _changed_onnx(
        size,
        [
            helper.make_node("ReduceMin", ["mean"], ["least"], keepdims=0),
            helper.make_node("Expand", ["least", "numbers"], ["large"]),
            helper.make_node("ReduceMin", ["large"], ["same"], keepdims=0),
            helper.make_node("Sub", ["same", "least"], ["zero"]),
            helper.make_node("Add", ["logits", "zero"], ["changed"]),
        ],
        [numpy_helper.from_array(np.array([numbers]), "numbers")],
    )


def _changed_onnx(size: int, nodes: list[onnx.NodeProto], values: list[onnx.TensorProto]) -> bytes:
    """The graph with nodes that make `changed` of its `logits`."""
    model = onnx.load_from_string(tiny_onnx(size))
    softmax = model.graph.node.pop()
    softmax.input[0] = "changed"
    model.graph.node.extend([*nodes, softmax])
    model.graph.initializer.extend(values)
    return bytes(model.SerializeToString())


def _extra_nodes(cell: int) -> list[onnx.NodeProto]:
    """The mean of both encoders' maps, over encoders and space, is the logits."""
    return [
        helper.make_node("Identity", ["mean"], ["features"]),
        helper.make_node("Transpose", ["float"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node(
            "AveragePool", ["planes"], ["cells"], kernel_shape=[cell, cell], strides=[cell, cell]
        ),
        helper.make_node("Mul", ["cells", "scale"], ["map"]),
        helper.make_node("Unsqueeze", ["map", "encoder"], ["both"]),
        helper.make_node("Mul", ["both", "halves"], ["maps"]),
        helper.make_node("ReduceMean", ["maps"], ["each"], axes=[3, 4], keepdims=0),
        helper.make_node("Softmax", ["each"], ["opinions"], axis=2),
    ]


def png(rgb: tuple[int, int, int]) -> bytes:
    """An image file of one color."""
    out = io.BytesIO()
    Image.new("RGB", (32, 32), rgb).save(out, "PNG")
    return out.getvalue()


RED, GREEN, BLUE = (png(rgb) for rgb in ((255, 0, 0), (0, 255, 0), (0, 0, 255)))
