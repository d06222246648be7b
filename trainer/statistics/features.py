"""Features of a plant's images as the consensus head takes them: of length one, in eight views of each image."""

import itertools

import numpy as np
import torch
from torch import Tensor

from trainer.models.network import Network, Tensors
from trainer.statistics.sums import VIEWS
from trainer.training.training_set import Augmentation, TrainingSet

_BATCH = 32
_SYMMETRIES = list(itertools.product((False, True), repeat=3))  # of the square; the first leaves an image as it is


def view_features(network: Network, tensors: Tensors, data: TrainingSet) -> np.ndarray:
    """Features [n, VIEWS, d] of each image in the eight symmetries of the square, the image as it is first.

    Other views of an image say what a defect's class has nothing to do with: a covariance that knows them needs fewer
    images.
    """
    assert len(_SYMMETRIES) == VIEWS
    count = len(data.labels)
    features = np.empty((count, VIEWS, network.shape.features), np.float32)
    with torch.no_grad():
        for start in range(0, count, _BATCH):
            chosen = slice(start, min(start + _BATCH, count))
            for view, symmetry in enumerate(_SYMMETRIES):
                inputs = data.encoder_input(network, tensors, chosen, _symmetry(symmetry, chosen.stop - start))
                features[chosen, view] = network.encode(tensors, inputs).cpu().numpy()
    lengths = np.linalg.norm(features, axis=2, keepdims=True)
    return np.asarray(features / np.maximum(lengths, np.finfo(np.float32).tiny))


def _symmetry(symmetry: tuple[bool, ...], count: int) -> Augmentation:
    each: Tensor = torch.tensor(symmetry)[:, None, None, None, None].expand(3, count, 1, 1, 1)
    return Augmentation(each, torch.zeros(2, count, 1, 1, 1))
