"""Features of a plant's images as the consensus head takes them: of length one,
in eight views of each image.
"""

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch

from trainer.data.training_set import Augmentation, TrainingSet
from trainer.models.network import Network, Tensors
from trainer.progress.long_work import steps
from trainer.statistics.sums import VIEWS, directions

# of the square; the first leaves an image as it is
_SYMMETRIES = list(itertools.product((False, True), repeat=3))

_remembered: ContextVar[dict[bytes, np.ndarray] | None] = ContextVar("features", default=None)


@contextmanager
def remembering_features() -> Iterator[None]:
    """Compute the features of each set of images but once while the block runs.

    Whoever tries a federation in several modes asks for those of the same images in each.
    """
    token = _remembered.set({})
    try:
        yield
    finally:
        _remembered.reset(token)


def _digest(network: Network, tensors: Tensors, data: TrainingSet) -> bytes:
    """Return a digest of all that features follow from."""
    digest = hashlib.blake2b(f"{network.shapes}".encode())
    encoder = {name: value for name, value in tensors.items() if "encoder" in name}
    for name, value in sorted(encoder.items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    for part in (data.images, data.mean, data.std):
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.digest()


def view_features(network: Network, tensors: Tensors, data: TrainingSet) -> np.ndarray:
    """Features [n, VIEWS, d] of each image in the eight symmetries of the square,
    the image as it is first.

    Other views of an image say what a defect's class has nothing to do with: a covariance that
    knows them needs fewer images. A batch is one image's views: its features do not depend on which
    other images there are, so an image can be taken out of sums exactly.
    """
    known = _remembered.get()
    if known is None:
        return _view_features(network, tensors, data)
    key = _digest(network, tensors, data)
    if key not in known:
        known[key] = _view_features(network, tensors, data)
    return known[key]


def _view_features(network: Network, tensors: Tensors, data: TrainingSet) -> np.ndarray:
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
