"""Features of a plant's images as the consensus head takes them: of length one,
in eight views of each image.
"""

import itertools

import numpy as np
import torch

from trainer.models.network import Network, Tensors
from trainer.progress.long_work import steps
from trainer.statistics.sums import VIEWS, directions
from trainer.training.training_set import Augmentation, TrainingSet

# of the square; the first leaves an image as it is
_SYMMETRIES = list(itertools.product((False, True), repeat=3))


def view_features(network: Network, tensors: Tensors, data: TrainingSet) -> np.ndarray:
    """Features [n, VIEWS, d] of each image in the eight symmetries of the square,
    the image as it is first.

    Other views of an image say what a defect's class has nothing to do with: a covariance that
    knows them needs fewer images. A batch is one image's views: its features do not depend on which
    other images there are, so an image can be taken out of sums exactly.
    """
    assert len(_SYMMETRIES) == VIEWS
    symmetries = torch.tensor(_SYMMETRIES).T[:, :, None, None, None]
    views = Augmentation(symmetries, torch.zeros(2, VIEWS, 1, 1, 1))
    features = np.empty((len(data.labels), VIEWS, network.shape.features), np.float32)
    with torch.no_grad():
        for number in steps("looking at images", range(len(features))):
            inputs = data.encoder_input(network, tensors, torch.full((VIEWS,), number), views)
            features[number] = network.encode(tensors, inputs).cpu().numpy()
    lengths = np.linalg.norm(features, axis=2, keepdims=True)
    return np.asarray(features / np.maximum(lengths, np.finfo(np.float32).tiny))


def projected_features(
    network: Network, tensors: Tensors, data: TrainingSet, dimensions: int
) -> np.ndarray:
    """`view_features` on so many public directions [n, VIEWS, dimensions]; 0 = as they are."""
    features = view_features(network, tensors, data)
    return features @ directions(features.shape[2], dimensions).T if dimensions else features
