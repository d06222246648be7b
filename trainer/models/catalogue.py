"""The models that there are: how wide their features are, how many numbers they hold, what they can begin with."""

from pathlib import Path
from typing import NamedTuple

from trainer.models.texture.texture_presets import PRESETS

FEATURES = {
    "mobilenet_v2": 1280,
    "efficientnet_lite0": 1280,
    "resnet18": 512,
    "resnet50": 2048,
    "small": 64,
    **{name: preset.features for name, preset in PRESETS.items()},
}
"""Width of each backbone's feature vector; the keys are the backbones there are."""

VALUES = {
    "mobilenet_v2": 2_257_984,
    "efficientnet_lite0": 3_413_024,
    "resnet18": 11_186_112,
    "resnet50": 23_561_152,
    "small": 60_864,
    **{name: preset.values for name, preset in PRESETS.items()},
}
"""How many numbers each backbone's encoder holds."""

SIZES = {name: preset.size for name, preset in PRESETS.items()}
"""Pixels of the images that a backbone takes, where it takes one size only."""


class Shipped(NamedTuple):
    """Weights that come with the package."""

    weights: str  # what `--weights` calls them
    file: Path


_PRETRAINED = Path(__file__).parent / "pretrained"
SHIPPED = {
    "mobilenet_v2": Shipped("surface", _PRETRAINED / "surface_mobilenet_v2.safetensors"),
    "efficientnet_lite0": Shipped("imagenet", _PRETRAINED / "imagenet_efficientnet_lite0.safetensors"),
}
"""By backbone. `research/pretraining` made them: `surface` of drawn images alone, `imagenet` of published weights."""


def find_shipped(model: str, weights: str) -> Path | None:
    """The file of these weights, if it comes with the package."""
    shipped = SHIPPED.get(model)
    return shipped.file if shipped and shipped.weights == weights else None


def suggest_weights(model: str) -> str:
    """A remedy where a model's initial weights cannot be had: what else `--weights` takes for it."""
    if model in SHIPPED:
        return f"pass --weights {SHIPPED[model].weights}, none or a FILE.safetensors"
    if (preset := PRESETS.get(model)) is None:
        return "pass --weights none or a FILE.safetensors"
    return f"pass --weights none or a FILE.safetensors of {preset.begins_with}"
