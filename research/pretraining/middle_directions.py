"""Directions of EfficientNet-Lite0's last features that photographs vary in most.

    python -m research.pretraining.middle_directions FILE.safetensors

`efficientnet_lite0_mid` takes the last features along these directions, beside those of the middle
of the network. No image is needed for the directions: BatchNorm keeps the mean and the deviation of
each channel of the last block over ImageNet. Normal numbers with these moments, passed through the
last layer, stand for photographs, and their principal components are the directions.

The directions are scaled once, so that on drawn surfaces both halves of the features are equally
long. Convolutions are kept in half precision.
"""

import sys
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import save_file

from trainer.data.drawn_surfaces import CLASSES, draw_images
from trainer.models import backbones
from trainer.models.encoders.staged_encoder import StagedEncoder
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix

_MODEL = "efficientnet_lite0"
_PLACES = 49  # of a photograph of 224 pixels
_SHARED = 0.7  # part of a channel's deviation that all places of a photograph share
_EPS = 1e-3  # of the network's BatchNorm
_PLANTS, _PER_CLASS, _SIZE, _SEED = 20, 3, 224, 7


def find_directions(
    weights: dict[str, np.ndarray], count: int = 128, photographs: int = 3000
) -> np.ndarray:
    """Return the principal components [count, 1280] of the last features."""
    random = np.random.default_rng(0)
    deviation = weights["_blocks.15._bn2.weight"]
    mean = weights["_blocks.15._bn2.bias"]
    convolution = weights["_conv_head.weight"][:, :, 0, 0]
    factor = weights["_bn1.weight"] / np.sqrt(weights["_bn1.running_var"] + _EPS)
    shift = weights["_bn1.bias"] - weights["_bn1.running_mean"] * factor
    features = []
    for _ in range(photographs):
        shared = random.normal(size=len(mean))
        own = random.normal(size=(_PLACES, len(mean)))
        maps = mean + deviation * _SHARED * (shared + own)
        features.append(np.clip(maps @ convolution.T * factor + shift, 0, 6).mean(0))
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    normalised = np.array(features) / lengths
    centred = normalised - normalised.mean(0)
    return np.linalg.svd(centred, full_matrices=False)[2][:count]


def balance(weights: dict[str, np.ndarray], directions: np.ndarray) -> float:
    """Return the factor that makes both halves equally long on drawn surfaces."""
    encoder = cast(StagedEncoder, backbones.build(_MODEL).eval())
    for name, value in encoder.state_dict().items():
        value.copy_(torch.from_numpy(weights[name]))
    mean = torch.tensor((0.485, 0.456, 0.406))[:, None, None]
    std = torch.tensor((0.229, 0.224, 0.225))[:, None, None]
    middle: list[float] = []
    end: list[float] = []
    labels = np.repeat(np.arange(len(CLASSES)), _PER_CLASS)
    for plant in range(_PLANTS):
        images = torch.from_numpy(draw_images(labels, _SIZE, _SEED, plant)).permute(0, 3, 1, 2)
        with torch.no_grad():
            maps = encoder.maps((images.float() / 255 - mean) / std, ["_blocks.14", "_bn1_relu"])
        halves = [each.mean((2, 3)).numpy() for each in maps]
        middle += np.linalg.norm(halves[0], axis=1).tolist()
        end += np.linalg.norm(halves[1] @ directions.T, axis=1).tolist()
    return float(np.mean(middle) / np.mean(end))


def main(target: Path) -> None:
    """Write the directions as the weight of a convolution."""
    found = strip_prefix("encoder", initial_encoder(_MODEL, "imagenet", seed=0))
    directions = find_directions(found)
    scaled = torch.from_numpy(balance(found, directions) * directions)
    save_file({"_projection.weight": scaled[:, :, None, None].half().contiguous()}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
