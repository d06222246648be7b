"""Parity check: a graph computes what the network computed when it was trained."""

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from torch.nn.functional import softmax

from broker_config.protocol.errors import UsageError
from edge.inference.predictor import session_options
from export.graph import REMEDY, Architecture, ParityError
from trainer.models.network import Network, Tensors
from trainer.seeding import generator

# largest difference between torch and onnxruntime, relative to the largest value or to 1
TOLERANCE = 1e-4
BATCHES = (1, 2, 5)


def check_parity(
    content: bytes, architecture: Architecture, tensors: Tensors, source: Path
) -> float:
    """The largest difference of an output between the graph and the network,
    over several batch sizes.

    Of a map it is its mean over space that is compared, which torch knows another way.

    Raises:
        ParityError: an output differs by more than TOLERANCE, or is not there.
        UsageError: the network itself gives no finite values.
    """
    largest = 0.0
    for count in BATCHES:
        images = draw_test_images(architecture.preprocessing.size, count)
        expected = _compute_expected(architecture, tensors, images)
        if not all(np.isfinite(value).all() for value in expected.values()):
            raise UsageError(
                f"the personal model in {source} gives no finite probabilities: its training has "
                "diverged",
                "train again with a smaller --training learning_rate",
            )
        largest = max(largest, compare(content, images, expected, source))
    return largest


def compare(
    content: bytes, images: np.ndarray, expected: dict[str, np.ndarray], source: Path
) -> float:
    """The largest difference between a graph's outputs for images uint8 [n, S, S,
    3] and what torch gives for them.

    It is relative to an output's largest value, or to 1. ParityError when it exceeds TOLERANCE.
    """
    running = open_session(content)
    names = output_names(running)
    found = dict(zip(names, running.run(names, {"image": images}), strict=True))
    if "maps" in found and expected["maps"].ndim == 3:  # known by their mean over space alone
        found["maps"] = found["maps"].mean((3, 4))
    largest = 0.0
    for name, value in ((name, expected[name]) for name in names):
        if found[name].shape != value.shape or not np.isfinite(found[name]).all():
            raise ParityError(
                f"the graph of {source} gives {found[name].shape} {name} for {len(images)} images",
                REMEDY,
            )
        largest = max(
            largest, float(np.abs(found[name] - value).max() / max(1, np.abs(value).max()))
        )
    if largest > TOLERANCE:
        raise ParityError(
            f"the graph of {source} differs from torch by {largest:.1e}, more than {TOLERANCE:.0e}",
            REMEDY,
        )
    return largest


def _compute_expected(
    architecture: Architecture, tensors: Tensors, images: np.ndarray
) -> dict[str, np.ndarray]:
    """What the network as it was trained gives for images uint8 [n, S, S, 3],
    by the names of the outputs.
    """
    network = Network(architecture.model, architecture.classes)
    fusion = architecture.fusion
    mean, std = (
        torch.tensor(values)
        for values in (architecture.preprocessing.mean, architecture.preprocessing.std)
    )
    with torch.no_grad():
        pixels = ((torch.from_numpy(images).float() / 255 - mean) / std).permute(0, 3, 1, 2)
        logits = network.predict(tensors, pixels)
        features = network.features(tensors, pixels)
        inputs = network.apply_stem(tensors, pixels)
        alone = [network.encode(tensors, inputs, prefix=prefix) for prefix in fusion.encoders]
    weight = tensors["classifier.weight"]
    bias = tensors["classifier.bias"]
    heads = fusion.split_head(weight, network.shape.features)
    shares = fusion.scale(heads, tensors)
    alone = fusion.normalise(alone, tensors)
    outputs: dict[str, Tensor] = {
        "probabilities": softmax(logits, 1),
        "opinions": softmax(
            torch.stack([each @ head.T for each, head in zip(alone, heads, strict=True)], 1) + bias,
            2,
        ),
        "features": features,
        "maps": torch.stack([each @ share.T for each, share in zip(alone, shares, strict=True)], 1),
    }
    return {name: value.numpy() for name, value in outputs.items()}


def output_names(session: onnxruntime.InferenceSession) -> list[str]:
    """Names of what a graph gives."""
    return [each.name for each in session.get_outputs()]


def open_session(content: bytes) -> onnxruntime.InferenceSession:
    """The graph, ready to run as the line runs it:
    where int8 needs slower kernels to be right, with them.
    """
    return onnxruntime.InferenceSession(
        content, session_options(), providers=["CPUExecutionProvider"]
    )


def draw_test_images(size: int, count: int) -> np.ndarray:
    """Smooth random images uint8 [count, size, size, 3]:
    no plant's image may leave it inside a bundle.
    """
    random = generator(0, "golden", count)
    coarse = random.uniform(0, 255, (count, -(-size // 8), -(-size // 8), 3))
    fine = coarse.repeat(8, 1).repeat(8, 2)[:, :size, :size] + random.normal(
        0, 8, (count, size, size, 3)
    )
    return fine.clip(0, 255).astype(np.uint8)
