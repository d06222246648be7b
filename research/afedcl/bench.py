"""What cells refer to by digest and cannot hold: images and first encoders."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from research.afedcl.cell import Cell
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, LabelledImages
from trainer.models.initial_weights import hang_on_seed, initial_encoder
from trainer.models.named_tensors import Arrays


class Material(NamedTuple):
    """All that some cells need, free of paths: it can be sent to other processes and machines."""

    catalogues: Mapping[str, Catalogue]  # by `Setting.images`
    pictures: Mapping[tuple[str, int], LabelledImages]  # by that and the size, in the catalogue's order
    encoders: Mapping[str, Arrays]  # by `Cell.weights`
    embed: bool = False  # whether features are wanted in two dimensions


class Bench:
    """Reads images and encoders once, when they are first asked for, and knows them by digest."""

    def __init__(self, folders: Mapping[str, Path], weights: Mapping[str, str]):
        """`folders` by the data set's name; `weights` (a name or a file) by model."""
        self._weights = weights
        catalogues = {name: class_folders.scan(folder) for name, folder in folders.items()}
        self.images = {name: _digest_images(catalogue) for name, catalogue in catalogues.items()}
        self._catalogues = {self.images[name]: catalogue for name, catalogue in catalogues.items()}
        self._encoders: dict[str, Arrays] = {}
        self._known: dict[tuple[str, int], str] = {}

    def encoder(self, model: str, seed: int) -> str:
        """The digest of a model's first encoder. Raises UsageError if its weights cannot be had."""
        weights = self._weights[model]
        place = (model, seed if hang_on_seed(model, weights) else 0)
        if place not in self._known:
            encoder = initial_encoder(model, weights, seed)
            self._known[place] = _digest_encoder(encoder)
            self._encoders[self._known[place]] = encoder
        return self._known[place]

    def material(self, cells: Iterable[Cell]) -> Material:
        """What these cells need; their images are decoded now."""
        cells = list(cells)
        return Material(
            {cell.setting.images: self._catalogues[cell.setting.images] for cell in cells},
            {
                (images, size): class_folders.load(self._catalogues[images], self._catalogues[images].classes, size)
                for images, size in {(cell.setting.images, cell.size) for cell in cells}
            },
            {cell.weights: self._encoders[cell.weights] for cell in cells},
        )


def _digest_images(catalogue: Catalogue) -> str:
    pairs = (f"{entry.digest} {entry.class_name}\n" for entry in catalogue.entries)
    return hashlib.sha256("".join(pairs).encode()).hexdigest()


def _digest_encoder(encoder: Arrays) -> str:
    whole = hashlib.sha256()
    for name, array in sorted(encoder.items()):
        whole.update(f"{name} {array.shape}\n".encode() + array.tobytes())
    return whole.hexdigest()
