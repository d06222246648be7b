"""A bundle small enough to be built in a test: the mean color of an image decides between three classes."""

import io
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from edge import bundle

CLASSES = ("red", "green", "blue")
SHARPNESS = 10.0


def tiny_bundle(
    folder: Path,
    *,
    size: int = 16,
    node: str = "tiny",
    round_: int = 1,
    federation: str = "test",
    run: str = "0" * 16,
    signing: bundle.Signing | None = None,
) -> bundle.Bundle:
    """Write and read back a bundle whose golden probabilities are computed in numpy, without onnxruntime."""
    description = bundle.Description(
        federation=federation,
        run=run,
        node=node,
        method="none",
        model="mean-color",
        round=round_,
        classes=CLASSES,
        input=bundle.Input(size=size),
    )
    golden = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    bundle.write(folder, description, tiny_onnx(size), golden, tuple(tiny_probabilities(golden[None])[0]), signing)
    return bundle.read(folder)


def tiny_probabilities(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What the graph computes: softmax(SHARPNESS * mean color / 255), uint8 [N, S, S, 3] -> [N, 3]."""
    powers = np.exp(SHARPNESS * images.mean((1, 2)) / 255)
    return powers / powers.sum(1, keepdims=True)


def tiny_onnx(size: int) -> bytes:
    """The graph, with a dynamic batch."""
    nodes = [
        helper.make_node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["float"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Mul", ["mean", "scale"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "mean-color",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", size, size, 3])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", len(CLASSES)])],
        [numpy_helper.from_array(np.float32(SHARPNESS / 255), "scale")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def png(rgb: tuple[int, int, int]) -> bytes:
    """An image file of one color."""
    out = io.BytesIO()
    Image.new("RGB", (32, 32), rgb).save(out, "PNG")
    return out.getvalue()


RED, GREEN, BLUE = (png(rgb) for rgb in ((255, 0, 0), (0, 255, 0), (0, 0, 255)))
