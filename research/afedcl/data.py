"""Images and first encoders, which cells name by digest."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from research.afedcl.cell import Cell
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, LabelledImages
from trainer.models.initial_weights import depends_on_seed, initial_encoder
from trainer.models.named_tensors import Arrays


class Inputs(NamedTuple):
    """What some cells need, free of paths: it can be sent to other processes and machines."""

    catalogues: Mapping[str, Catalogue]  # by `Setting.images`
    # by that and the size, in the catalogue's order
    images: Mapping[tuple[str, int], LabelledImages]
    encoders: Mapping[str, Arrays]  # by `Cell.weights`


class Sources:
    """Data sets and initial weights.

    Images and encoders are read once, when they are first needed.
    """

    def __init__(self, folders: Mapping[str, Path], weights: Mapping[str, str]):
        """`folders` by the data set's name; `weights` (a name or a file) by model."""
        self._weights = weights
        catalogues = {name: class_folders.scan(folder) for name, folder in folders.items()}
        self.images = {name: _digest_images(catalogue) for name, catalogue in catalogues.items()}
        self._catalogues = {self.images[name]: catalogue for name, catalogue in catalogues.items()}
        self._encoders: dict[str, Arrays] = {}
        self._digests: dict[tuple[str, int], str] = {}

    def encoder(self, model: str, seed: int) -> str:
        """The digest of a model's first encoder. Raises UsageError if its weights cannot be had."""
        weights = self._weights[model]
        place = (model, seed if depends_on_seed(model, weights) else 0)
        if place not in self._digests:
            encoder = initial_encoder(model, weights, seed)
            self._digests[place] = _digest_encoder(encoder)
            self._encoders[self._digests[place]] = encoder
        return self._digests[place]

    def inputs(self, cells: Collection[Cell]) -> Inputs:
        """What these cells need; their images are decoded now."""
        return Inputs(
            {cell.setting.images: self._catalogues[cell.setting.images] for cell in cells},
            {
                (images, size): class_folders.load(
                    self._catalogues[images], self._catalogues[images].classes, size
                )
                for images, size in {(cell.setting.images, cell.size) for cell in cells}
            },
            {cell.weights: self._encoders[cell.weights] for cell in cells},
        )


def _digest_images(catalogue: Catalogue) -> str:
    pairs = (f"{entry.digest} {entry.class_name}\n" for entry in catalogue.entries)
    return hashlib.sha256("".join(pairs).encode()).hexdigest()


def _digest_encoder(encoder: Arrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(encoder.items()):
        digest.update(f"{name} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()
