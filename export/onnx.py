"""Personal models -> bundles: one traced graph a federation, each node's values put into it, parity checked first."""

import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
import onnxruntime
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from broker_config.errors import EdgeNodeError, UsageError
from broker_config.messages import Preprocessing
from edge import bundle
from export.signing import Signer
from trainer import backbones, personal, progress
from trainer.network import Network, Tree
from trainer.seeding import generator
from trainer.weights import FEATURES

TOLERANCE = 1e-4  # largest difference of a probability between torch and onnxruntime
BATCHES = (1, 2, 5)
_OPSET = 20


class ParityError(EdgeNodeError):
    """onnxruntime does not compute what torch computes: nothing was written."""


class Architecture(NamedTuple):
    """What two models must share to share a graph."""

    model: str
    classes: int
    encoders: Literal["one", "fused", "joined"]
    preprocessing: Preprocessing


class Exported(NamedTuple):
    """A written bundle, and the largest difference of a probability between torch and onnxruntime."""

    folder: Path
    node: str
    difference: float


def export(
    models: Sequence[Path], folder: Path, report: progress.Report, signer: Signer | None = None
) -> list[Exported]:
    """Write a bundle `folder/NODE` for each model folder in `models`, signed if there is a `signer`.

    Raises:
        UsageError: a folder holds no usable personal model, two are of one node, or one cannot be signed.
        ParityError: a graph's probabilities differ from torch's; that bundle is not written.
    """
    _check_nodes([personal.load_facts(source).node for source in models])
    graphs: dict[Architecture, onnx.ModelProto] = {}
    written = []
    for source in models:
        facts, tree, _ = personal.load(source)
        signing = signer.check(facts, tree, source) if signer else None
        if facts.broadcast and not signer:
            text = f"the bundle of {facts.node} will not be signed, and serve --trust refuses it: --kit FILE signs"
            report(progress.Note(text=text))
        architecture = Architecture(facts.model, len(facts.classes), _encoders(tree), facts.preprocessing)
        module = _module(architecture, tree, source)
        if architecture not in graphs:
            what = f"tracing {facts.model} for {len(facts.classes)} classes, once for all nodes: 10 to 30 s"
            report(progress.Step(what=what))
            graphs[architecture] = _trace(module, facts.preprocessing.size)
            report(progress.Step(what="checking models against torch and writing their bundles"))
        content = _with_values(graphs[architecture], module)
        difference = _check_parity(content, architecture, tree, source)
        golden = _pictures(facts.preprocessing.size, 1)
        description = bundle.Description(
            federation=facts.federation,
            run=facts.run,
            node=facts.node,
            method=facts.method,
            model=facts.model,
            round=facts.round,
            classes=facts.classes,
            input=bundle.Input(size=facts.preprocessing.size),
            metrics=facts.metrics,
        )
        target = folder / facts.node
        bundle.write(target, description, content, golden[0], _run(content, golden)[0].tolist(), signing)
        written.append(Exported(target, facts.node, difference))
        size = len(content)
        report(progress.Exported(node=facts.node, folder=str(target), bytes=size, difference=difference))
    return written


def _encoders(tree: Tree) -> Literal["one", "fused", "joined"]:
    """How the model comes to its features; `Network.see` says what the words mean."""
    if not any(name.startswith("received.") for name in tree):
        return "one"
    return "fused" if "fusion" in tree else "joined"


def _check_nodes(names: Sequence[str]) -> None:
    """Raise UsageError if two models would be written to one folder."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{names.count(name)} of the models are of node {name}", "export them to different folders"
            )


class _Served(nn.Module):
    """uint8 images [n, S, S, 3] -> probabilities [n, classes], preprocessing included."""

    fusion: Tensor
    channel_mean: Tensor
    channel_std: Tensor

    def __init__(self, architecture: Architecture):
        super().__init__()
        self.encoder = backbones.build(architecture.model)
        self.received = None if architecture.encoders == "one" else backbones.build(architecture.model)
        features = FEATURES[architecture.model] * (2 if architecture.encoders == "joined" else 1)
        self.classifier = nn.Linear(features, architecture.classes)
        self.fuses = architecture.encoders == "fused"
        if self.fuses:
            self.register_buffer("fusion", torch.zeros(()))
        self.register_buffer("channel_mean", torch.tensor(architecture.preprocessing.mean))
        self.register_buffer("channel_std", torch.tensor(architecture.preprocessing.std))

    def forward(self, image: Tensor) -> Tensor:
        pixels = ((image.float() / 255 - self.channel_mean) / self.channel_std).permute(0, 3, 1, 2)
        features = self.encoder(pixels)
        if self.received is not None:
            received = self.received(pixels)
            features = Network.fuse(self.fusion, received, features) if self.fuses else Network.join(received, features)
        return torch.softmax(self.classifier(features), 1)


def _module(architecture: Architecture, tree: Tree, source: Path) -> nn.Module:
    """The served model with these values, BatchNorm folded into the convolutions."""
    served = _Served(architecture).eval()
    state = served.state_dict()
    expected = {name: value.shape for name, value in state.items() if not name.startswith("channel_")}
    if expected != {name: value.shape for name, value in tree.items()}:
        raise UsageError(
            f"the personal model in {source} does not hold the tensors of {architecture.model}", "copy the folder again"
        )
    for name, value in tree.items():
        state[name].copy_(value)
    return fuse(served)


def _trace(module: nn.Module, size: int) -> onnx.ModelProto:
    """The graph of `module` with a dynamic batch; its initialisers carry the names of the module's tensors."""
    example = torch.zeros((2, size, size, 3), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter, of no use to a user
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program: Any = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            opset_version=_OPSET,
            input_names=["image"],
            output_names=["probabilities"],
            dynamic_shapes={"image": {0: torch.export.Dim("batch")}},
            verbose=False,
            optimize=False,
        )
    return program.model_proto


def _with_values(graph: onnx.ModelProto, module: nn.Module) -> bytes:
    """The graph as bytes, its initialisers set to the module's values, then simplified.

    Only in this order: simplifying folds values into new ones, which no longer carry a tensor's name.
    """
    filled = onnx.ModelProto()
    filled.CopyFrom(graph)
    values = module.state_dict()
    for initialiser in filled.graph.initializer:
        if initialiser.name in values:
            array = np.ascontiguousarray(values.pop(initialiser.name).numpy())
            initialiser.CopyFrom(onnx.numpy_helper.from_array(array, initialiser.name))
    if values:
        raise ParityError(f"the traced graph has no place for {', '.join(sorted(values))}", _REMEDY)
    buffer = io.BytesIO()
    onnx.save(onnxscript.optimizer.optimize(filled), buffer)
    return buffer.getvalue()


def _check_parity(content: bytes, architecture: Architecture, tree: Tree, source: Path) -> float:
    """The largest difference between the graph and the network as it was trained, over several batch sizes."""
    network = Network(architecture.model, architecture.classes)
    mean, std = (torch.tensor(values) for values in (architecture.preprocessing.mean, architecture.preprocessing.std))
    largest = 0.0
    for count in BATCHES:
        images = _pictures(architecture.preprocessing.size, count)
        with torch.no_grad():
            pixels = ((torch.from_numpy(images).float() / 255 - mean) / std).permute(0, 3, 1, 2)
            expected = torch.softmax(network.judge(tree, pixels), 1).numpy()
        if not np.isfinite(expected).all():
            raise UsageError(
                f"the personal model in {source} gives no finite probabilities: its training has diverged",
                "train again with a smaller --training learning_rate",
            )
        found = _run(content, images)
        if found.shape != expected.shape or not np.isfinite(found).all():
            raise ParityError(f"the graph of {source} gives {found.shape} values for a batch of {count}", _REMEDY)
        largest = max(largest, float(np.abs(found - expected).max()))
    if largest > TOLERANCE:
        raise ParityError(
            f"the graph of {source} differs from torch by {largest:.1e}, more than {TOLERANCE:.0e}", _REMEDY
        )
    return largest


_REMEDY = "install the torch, onnx and onnxscript versions of constraints.txt; report it if it stays"


def _run(content: bytes, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["probabilities"], {"image": images})[0])


def _pictures(size: int, count: int) -> np.ndarray:
    """Smooth random images uint8 [count, size, size, 3]: no plant's image may leave it inside a bundle."""
    random = generator(0, "golden", count)
    coarse = random.uniform(0, 255, (count, -(-size // 8), -(-size // 8), 3))
    fine = coarse.repeat(8, 1).repeat(8, 2)[:, :size, :size] + random.normal(0, 8, (count, size, size, 3))
    return fine.clip(0, 255).astype(np.uint8)
