"""Pretrained first layers of texture networks:
their names in published files and in our networks. numpy only.
"""

import re

import numpy as np

from trainer.models.named_tensors import Arrays

_NORMALISED = {"0": "colour", "2": "conv1_1", "5": "conv1_2", "9": "conv2_1", "12": "conv2_2"}
_COLOUR = {"0.weight": (3, 3, 1, 1), "0.bias": (3,)}  # first layer of the normalised VGG19
_TORCHVISION = {
    "features.0": "conv1_1",
    "features.2": "conv1_2",
    "features.5": "conv2_1",
    "features.7": "conv2_2",
}
# DenseNet's file: norm.1 is its module's norm1
_OLD_DOT = re.compile(r"(?<=\.(?:norm|relu|conv))\.(?=[12]\.)")
# with which images are normalised before the stem
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


def rename_pretrained(arrays: Arrays, *, stem: bool) -> Arrays:
    """The tensors in `arrays` that a texture network starts from,
    renamed to its own names; empty if there are none.

    Args:
        arrays: VGG19 as torchvision names it, or normalised (Huang and Belongie, 2017; layers
            numbered from a 1 x 1 one, of colours); for a network without a stem, torchvision's
            network of its trunk.
        stem: whether the network has one.
    """
    if not stem:
        return {f"trunk.{_OLD_DOT.sub('', name)}": array for name, array in arrays.items()}
    if {name: arrays[name].shape for name in _COLOUR if name in arrays} == _COLOUR:
        return _fold_normalisation(_rename(arrays, _NORMALISED))
    unchanged_colours = {
        "stem.colour.weight": np.eye(3, dtype=np.float32)[:, :, None, None],
        "stem.colour.bias": np.zeros(3, np.float32),
    }
    return {**unchanged_colours, **_rename(arrays, _TORCHVISION)}


def _rename(arrays: Arrays, names: dict[str, str]) -> Arrays:
    wanted = {}
    for old, new in names.items():
        for kind in ("weight", "bias"):
            wanted[f"{old}.{kind}"] = f"stem.{new}.{kind}"
    return {new: arrays[old] for old, new in wanted.items() if old in arrays}


def _fold_normalisation(stem: Arrays) -> Arrays:
    """The colour layer, which expects images in 0..1, changed to take them normalised,
    as all our networks do.
    """
    weight = stem["stem.colour.weight"]
    bias = stem["stem.colour.bias"]
    mean, std = (np.asarray(each, np.float32)[None, :, None, None] for each in (_MEAN, _STD))
    return {
        **stem,
        "stem.colour.weight": weight * std,
        "stem.colour.bias": bias + (weight * mean).sum((1, 2, 3)),
    }
