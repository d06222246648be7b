"""Networks -> ONNX: the module that is served, traced once an architecture,
each node's values put into the graph.
"""

import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import onnx
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.nn.functional import linear

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Preprocessing
from trainer.models import backbones
from trainer.models.catalogue import FEATURES
from trainer.models.encoders.encoder_module import EncoderModule
from trainer.models.fusion import ALONE, NOVELTY, OWN, RECEIVED, Fusion
from trainer.models.named_tensors import is_below
from trainer.models.network import Tensors

EXTRAS: tuple[Literal["opinions", "features", "maps"], ...] = ("opinions", "features", "maps")
OUTPUTS = ("probabilities", *EXTRAS)
"""Of a graph; some have no maps, which come last."""
REMEDY = "install the torch, onnx and onnxscript versions of constraints.txt; report it if it stays"
Encoder = Literal["received", "own", "alone"]
ENCODER_NAMES: dict[str, Encoder] = {RECEIVED: "received", OWN: "own", ALONE: "alone"}
"""What bundles call a personal model's encoders."""
_OPSET = 20
_OURS = ("temperature", "channel_mean")  # values that no personal model holds


class ParityError(EdgeNodeError):
    """onnxruntime does not compute what torch computes: nothing was written."""


class Architecture(NamedTuple):
    """What two models must share to share a graph."""

    model: str
    classes: int
    fusion: Fusion
    preprocessing: Preprocessing


class _Served(nn.Module):
    """uint8 images [n, S, S, 3] -> probabilities [n, classes] and EXTRAS;
    `build_module` folds the preprocessing in.

    Encoders share a stem. The maps of all encoders, averaged over space and added up, plus the
    classifier's bias, are the logits (before they are divided by the temperature): a map says what
    each place of the image adds to each class. Where features are no sum over places there are
    none.
    """

    temperature: Tensor
    channel_mean: Tensor

    def __init__(self, architecture: Architecture):
        super().__init__()
        self.encoder = backbones.build(architecture.model)
        self.has_stem = "stem" in dict(self.encoder.named_children())
        self.architecture = architecture
        self.features = FEATURES[architecture.model]
        fusion = architecture.fusion
        for prefix in fusion.encoders:
            if prefix != OWN:
                self.add_module(prefix, backbones.build(architecture.model).without_stem())
        self.classifier = nn.Linear(fusion.width(self.features), architecture.classes)
        for name in fusion.scalars:
            path, _, last = name.rpartition(".")
            if path:
                self.add_module(path, nn.Module())
            self.get_submodule(path).register_buffer(last, torch.zeros(()))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer(
            "channel_mean", 255 * torch.tensor(architecture.preprocessing.mean)[:, None, None]
        )

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        fusion = self.architecture.fusion
        pixels = image.permute(0, 3, 1, 2).float() - self.channel_mean
        inputs = self.encoder.get_submodule("stem")(pixels) if self.has_stem else pixels
        both = [cast(EncoderModule, self.get_submodule(prefix)) for prefix in fusion.encoders]
        alone, places = zip(*(encoder.explain(inputs) for encoder in both), strict=True)
        weight = self.classifier.weight
        bias = self.classifier.bias
        scalars = {name: self.get_buffer(name) for name in fusion.scalars}
        features = fusion.fuse(alone, scalars)
        parts = fusion.split_head(weight, self.features)
        read = zip(fusion.normalise(alone, scalars), parts, strict=True)
        opinions = torch.stack([linear(each, part, bias) for each, part in read], 1)
        heads = fusion.heads(weight, alone, scalars)
        maps = [adds(head) for adds, head in zip(places, heads, strict=True) if adds]
        stacked_maps = [torch.stack(maps, 1)] if maps else []
        return (
            torch.softmax(self.classifier(features) / self.temperature, 1),
            torch.softmax(opinions / self.temperature, 2),
            features,
            *stacked_maps,
        )


def build_module(architecture: Architecture, tensors: Tensors, source: Path) -> nn.Module:
    """The served model with these values; BatchNorm and preprocessing are folded into
    convolutions.
    """
    served = _Served(architecture).eval()
    state = served.state_dict()
    tensors = {name: value for name, value in tensors.items() if not is_below(name, NOVELTY)}
    expected = {name: value.shape for name, value in state.items() if name not in _OURS}
    if expected != {name: value.shape for name, value in tensors.items()}:
        raise UsageError(
            f"the personal model in {source} does not hold the tensors of {architecture.model}",
            "copy the folder again",
        )
    for name, value in tensors.items():
        state[name].copy_(value)
    folded = (
        fuse(served)
        if any(isinstance(each, nn.BatchNorm2d) for each in served.modules())
        else served
    )
    prefixes = (OWN,) if served.has_stem else architecture.fusion.encoders
    for prefix in prefixes:
        _fold_scale(folded.get_submodule(prefix), architecture.preprocessing.std)
    for each in folded.modules():
        if isinstance(each, nn.ReLU | nn.ReLU6):
            # the exporter takes apart what writes in place, half of all its time with MobileNet
            each.inplace = False
    return folded


def _fold_scale(encoder: nn.Module, std: Sequence[float]) -> None:
    """Let the first convolution take pixels 0..255, their mean subtracted: zeros,
    which pad them, mean the same.
    """
    convolution = next(each for each in encoder.modules() if isinstance(each, nn.Conv2d))
    convolution.weight.data /= 255 * torch.tensor(std)[:, None, None]


def trace(module: nn.Module, size: int, outputs: Sequence[str] = OUTPUTS) -> onnx.ModelProto:
    """The graph of `module` with a dynamic batch;
    its initialisers carry the names of the module's tensors.

    `outputs` names what the module gives; it may give less than that.
    """
    example = torch.zeros((2, size, size, 3), dtype=torch.uint8)
    with torch.no_grad():
        count = len(module(example))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter, of no use to a user
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program: Any = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            opset_version=_OPSET,
            input_names=["image"],
            output_names=outputs[:count],
            dynamic_shapes={"image": {0: torch.export.Dim("batch")}},
            verbose=False,
            optimize=False,
        )
    return program.model_proto


def fill_values(graph: onnx.ModelProto, module: nn.Module) -> bytes:
    """The graph as bytes, its initialisers set to the module's values, then simplified.

    Only in this order: simplifying folds values into new ones, which no longer carry a tensor's
    name.
    """
    filled = onnx.ModelProto()
    filled.CopyFrom(graph)
    values = module.state_dict()
    # Simplifying makes one initialiser of all that are equal. A length of 1 would then change with
    # the temperature, which is set later and must only divide logits. NaN equals nothing else.
    temperature = values.get("temperature")
    if temperature is not None:
        values["temperature"] = torch.full_like(temperature, torch.nan)
    for initialiser in filled.graph.initializer:
        if initialiser.name in values:
            array = np.ascontiguousarray(values.pop(initialiser.name).numpy())
            initialiser.CopyFrom(onnx.numpy_helper.from_array(array, initialiser.name))
    if values:
        raise ParityError(f"the traced graph has no place for {', '.join(sorted(values))}", REMEDY)
    buffer = io.BytesIO()
    onnx.save(onnxscript.optimizer.optimize(filled), buffer)
    content = buffer.getvalue()
    return content if temperature is None else set_temperature(content, float(temperature))


def set_temperature(graph: bytes, temperature: float) -> bytes:
    """The graph, dividing its logits by another temperature."""
    model = onnx.load_from_string(graph)
    (value,) = [value for value in model.graph.initializer if value.name == "temperature"]
    value.CopyFrom(onnx.numpy_helper.from_array(np.array(temperature, np.float32), value.name))
    return bytes(model.SerializeToString())
