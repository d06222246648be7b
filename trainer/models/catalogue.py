"""The models that there are: how wide their features are, how many numbers they hold, what they can begin with."""

from pathlib import Path

from trainer.models.texture.texture_presets import PRESETS

FEATURES = {
    "mobilenet_v2": 1280,
    "resnet18": 512,
    "resnet50": 2048,
    "small": 64,
    **{name: preset.features for name, preset in PRESETS.items()},
}
"""Width of each backbone's feature vector; the keys are the backbones there are."""

VALUES = {
    "mobilenet_v2": 2_257_984,
    "resnet18": 11_186_112,
    "resnet50": 23_561_152,
    "small": 60_864,
    **{name: preset.values for name, preset in PRESETS.items()},
}
"""How many numbers each backbone's encoder holds."""

SIZES = {name: preset.size for name, preset in PRESETS.items()}
"""Pixels of the images that a backbone takes, where it takes one size only."""

SURFACE = {"mobilenet_v2": Path(__file__).parent / "pretrained" / "surface_mobilenet_v2.safetensors"}
"""The weights that come with the package, by backbone: `research/pretraining` made them from drawn images alone."""


def suggest_weights(model: str) -> str:
    """A remedy where a model's initial weights cannot be had: what else `--weights` takes for it."""
    if model in SURFACE:
        return "pass --weights surface, none or a FILE.safetensors"
    if (preset := PRESETS.get(model)) is None:
        return "pass --weights none or a FILE.safetensors"
    return f"pass --weights none or a FILE.safetensors of {preset.begins_with}"
