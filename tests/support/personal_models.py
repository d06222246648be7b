"""Personal models with decided answers, images for them,
and the probabilities that torch computes.
"""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.messages import Preprocessing, Training
from export.graph import set_temperature
from tests.support.federation_keys import FederationKeys
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft, trains
from trainer.methods import make
from trainer.models.fusion import LENGTH
from trainer.models.named_tensors import add_prefix, is_frozen, strip_prefix
from trainer.models.network import Network, Tensors, to_arrays, to_tensors
from trainer.seeding import generator
from trainer.training.personal_model import ModelMetadata, PersonalModel

CLASSES = ("crazing", "inclusion", "patches")
SMALL = Request("afedcl", model="small", size=32, rounds=4)
METRICS = {"accuracy": 0.875}


def made(request: Request, node: str, method: str, seed: int) -> PersonalModel:
    """The model that `method` deploys at a node which has not trained, its answers made decided."""
    request = request._replace(method=method, seed=seed)
    request = request if trains(request) else request._replace(rounds=0)
    spec, own = draft(request, federation="steel", classes=CLASSES, nodes=2)
    _, received = draft(
        request._replace(seed=seed + 1000), federation="steel", classes=CLASSES, nodes=2
    )
    entry = make(method, spec.training, spec.options)
    network = Network(spec.model, len(CLASSES))
    tensors = to_tensors({**own, **entry.init_node(own, network.shape, generator(seed, node))})
    if entry.statistics is None:
        personal = entry.deploy(entry.receive(tensors, to_tensors(own)), to_tensors(received))
    else:
        pictures = _labelled_pictures(spec.preprocessing)
        features = entry.statistics.features(network, tensors, pictures)
        sums = to_tensors(entry.statistics.make(features, pictures.labels.numpy(), len(CLASSES)))
        nobody = {name: torch.zeros_like(value) for name, value in sums.items()}
        personal = entry.statistics.deploy(network, sums, {**tensors, **nobody}, True)
    tensors = _decided(_varied(personal, seed), network, spec.preprocessing.size)
    return PersonalModel(ModelMetadata.from_spec(spec, node, 4, {}, METRICS, ()), tensors)


def normalised(model: PersonalModel, length: float) -> PersonalModel:
    """The model with its features brought to this length, its answers made decided."""
    metadata, tensors = model.metadata, {**model.tensors, LENGTH: torch.tensor(length)}
    network = Network(metadata.model, len(metadata.classes))
    return model._replace(tensors=_decided(tensors, network, metadata.preprocessing.size))


def _labelled_pictures(preprocessing: Preprocessing) -> TrainingSet:
    labels = np.arange(6) % len(CLASSES)
    names = tuple(map(str, labels))
    return TrainingSet.of(
        LabelledImages(pictures(preprocessing.size, 6), labels, names, ()), preprocessing
    )


def _varied(tensors: Tensors, seed: int) -> Tensors:
    """The tensors with BatchNorm statistics and a fusion weight such as training leaves."""
    random = torch.Generator().manual_seed(seed)

    def varied(name: str, value: Tensor) -> Tensor:
        if name.endswith("running_mean"):
            return value * (1 + 0.1 * torch.randn(value.shape, generator=random))
        if name.endswith("running_var"):
            return value * (0.75 + 0.5 * torch.rand(value.shape, generator=random))
        if name == "fusion":
            return torch.tensor(0.2 + 0.1 * (seed % 5))
        return value

    return {name: varied(name, value) for name, value in tensors.items()}


def _decided(tensors: Tensors, network: Network, size: int) -> Tensors:
    """The tensors with a classifier that is sure of some pictures,
    torn between classes at others.
    """
    with torch.no_grad():
        logits = network.predict(
            tensors, torch.from_numpy(pictures(size, 8)).permute(0, 3, 1, 2) / 127.5 - 1
        )
    scale = 3 / logits.std(0).max()
    bias = (tensors["classifier.bias"] - logits.mean(0)) * scale
    return {
        **tensors,
        "classifier.weight": tensors["classifier.weight"] * scale,
        "classifier.bias": bias,
    }


def torch_probabilities(model: PersonalModel, images: np.ndarray) -> np.ndarray:
    """What the network as it was trained gives for uint8 [n, S, S, 3]."""
    metadata = model.metadata
    mean, std = torch.tensor(metadata.preprocessing.mean), torch.tensor(metadata.preprocessing.std)
    pixels = ((torch.from_numpy(images).float() / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.no_grad():
        return torch.softmax(
            Network(metadata.model, len(metadata.classes)).predict(model.tensors, pixels), 1
        ).numpy()


def pictures(size: int, count: int) -> np.ndarray:
    """uint8 [count, size, size, 3] of blocks in random colours."""
    blocks = np.random.default_rng(count).integers(
        0, 256, (count, size // 8, size // 8, 3), np.uint8
    )
    return blocks.repeat(8, 1).repeat(8, 2)


def signed_fields(
    signers: FederationKeys, model: PersonalModel, **changes: object
) -> PersonalModel:
    """The model, made from a broadcast that the coordinator has signed;
    AFedCL's serves it as it came.
    """
    received = add_prefix("encoder", strip_prefix("received", model.tensors))
    if received:  # its stem is there once, as the own encoder's
        received |= {name: value for name, value in model.tensors.items() if is_frozen(name)}
    metadata = model.metadata
    content = (
        {"digest": hashlib.sha256(encode_tensors(to_arrays(received))).hexdigest()}
        if received
        else {}
    )
    broadcast = signers.broadcast(
        **{"run": metadata.run, "round": metadata.round} | content | changes
    )
    return model._replace(
        metadata=msgspec.structs.replace(metadata, node="plant-a", broadcast=broadcast)
    )


FACTS = ModelMetadata(
    federation="steel",
    run="0123456789abcdef",
    round=30,
    node="plant-1",
    method="afedcl",
    options={"lambda": 0.1},
    model="small",
    classes=("patches", "scratches"),
    preprocessing=Preprocessing(size=32, mean=(0.1, 0.2, 0.3)),
    training=Training(learning_rate=2e-4),
    rounds=30,
    seed=7,
    trained={"patches": 4, "scratches": 5},
    software={"torch": "2.13.0"},
    created="2026-01-02T03:04:05+00:00",
    metrics={"accuracy": 0.1 + 0.2},
    history=({"round": 1.0, "L_D": 1 / 3}, {"round": 2.0, "A_k": -1e-9}),
)


def graph_of(bundle: Path) -> bytes:
    """A bundle's graph before its confidences were calibrated."""
    return set_temperature((bundle / "model.onnx").read_bytes(), 1.0)
