"""The encoders: image [n, 3, S, S] -> features [n, F]. torchvision's networks, EfficientNet-Lite0 and a small one."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import torch
from torch import Tensor, nn

from broker_config.protocol.errors import UsageError
from trainer.models.catalogue import SHIPPED, find_shipped, suggest_weights
from trainer.models.efficientnet_lite import efficientnet_lite0
from trainer.models.named_tensors import Arrays, select
from trainer.models.texture import texture_weights
from trainer.models.texture.texture_presets import PRESETS
from trainer.models.torchvision_import import torchvision_models
from trainer.training.seeding import key_to_seed


class PooledFeatures(nn.Module):
    """A convolutional stack and global average pooling."""

    def __init__(self, features: nn.Module):
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        """[n, 3, S, S] -> [n, features]."""
        return cast(Tensor, self.features(images)).mean((2, 3))


def _mobilenet_v2() -> nn.Module:
    return PooledFeatures(torchvision_models().mobilenet_v2().features)


def _resnet(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        network = getattr(torchvision_models(), name)()
        network.fc = nn.Identity()
        return cast(nn.Module, network)

    return build


def _small() -> nn.Module:
    """Four strided convolutions with group normalisation: it learns from scratch, and from batches of any size."""
    widths = (3, 16, 32, 64, 64)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return PooledFeatures(nn.Sequential(*layers))


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": _mobilenet_v2,
    "efficientnet_lite0": efficientnet_lite0,
    "resnet18": _resnet("resnet18"),
    "resnet50": _resnet("resnet50"),
    "small": _small,
    **{name: preset.build for name, preset in PRESETS.items()},
}
_PATIENCE = 3.0  # seconds for a server to say that it is there
_IMAGENET = {
    "mobilenet_v2": "MobileNet_V2_Weights",
    "resnet18": "ResNet18_Weights",
    "resnet50": "ResNet50_Weights",
    **{name: preset.imagenet for name, preset in PRESETS.items()},
}


def build(model: str) -> nn.Module:
    """The encoder's structure, without BatchNorm's integer counters: nothing uses them, and they do not average."""
    encoder = _BUILDERS[model]()
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None
    return encoder


def feature_map(encoder: nn.Module, images: Tensor) -> Tensor:
    """[n, 3, S, S] -> what the last convolution gives, [n, features, h, w]; its mean is the encoder's features."""
    if isinstance(encoder, PooledFeatures):
        return cast(Tensor, encoder.features(images))
    for name, layer in encoder.named_children():  # in the order in which they run
        if name == "avgpool":
            break
        images = layer(images)
    return images


def draw(model: str, seed: int) -> Arrays:
    """Random initial weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_to_seed(seed, "encoder"))
        return _to_arrays(build(model).state_dict())


def can_download(model: str) -> bool:
    """Whether `download` can be expected to succeed: the file is in torch's cache, or its server answers."""
    if model not in _IMAGENET:
        return False
    url = _imagenet_weights(model).url
    if (Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]).is_file():
        return True
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_PATIENCE):  # noqa: S310  (torchvision's own address)
            return True
    except OSError:
        return False


def _imagenet_weights(model: str) -> Any:
    return getattr(torchvision_models(), _IMAGENET[model]).DEFAULT


def download(model: str, seed: int) -> Arrays:
    """torchvision's ImageNet weights; where a model only begins with them, the rest is drawn from `seed`.

    Raises:
        UsageError: the model has none, or there is no internet connection.
    """
    if model not in _IMAGENET:
        others = [name for name in SHIPPED if find_shipped(name, "imagenet")] + list(_IMAGENET)
        raise UsageError(f"there are no ImageNet weights for {model!r}", f"take one of {', '.join(others)}")
    weights = _imagenet_weights(model)
    try:
        with redirect_stdout(sys.stderr):  # torch says there what it downloads; our standard output may be JSON
            state = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (URLError, OSError, RuntimeError) as error:
        other = "" if model in PRESETS else ", or take --model efficientnet_lite0, whose ImageNet weights are here"
        raise UsageError(
            f"the ImageNet weights could not be downloaded from {weights.url} ({error})",
            f"connect to the internet once, or {suggest_weights(model)}{other}",
        ) from error
    if model not in PRESETS:
        return _to_arrays({name: state[name] for name in build(model).state_dict()})
    drawn = draw(model, seed)
    begun = texture_weights.rename_pretrained(_to_arrays(state), stem=PRESETS[model].stem)
    return {**drawn, **select(begun, drawn)}


def _to_arrays(state: dict[str, Tensor]) -> Arrays:
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in state.items()}
