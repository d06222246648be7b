"""The public frame: of drawn surfaces alone, the same for everybody,
and along what surfaces differ.
"""

import numpy as np
import torch

from broker_config.protocol.messages import Preprocessing
from trainer.data.class_folders import Images
from trainer.data.drawn_surfaces import CLASSES, draw_images
from trainer.data.training_set import TrainingSet, encode_all
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, Tensors, to_tensors
from trainer.statistics import public_frame as module
from trainer.statistics.private_sums import DIRECTIONS
from trainer.statistics.public_frame import public_frame

NETWORK = Network("small", 3)


def encoder(seed: int = 0) -> Tensors:
    return to_tensors(initial_encoder("small", "none", seed))


def images(size: int = 32, seed: int = 0) -> TrainingSet:
    none = TrainingSet.of(Images.none(size).train, Preprocessing(size=size))
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (4, 3, size, size), generator=random, dtype=torch.uint8)
    return none._replace(images=pixels, labels=torch.zeros(4, dtype=torch.int64))


def test_it_is_a_point_among_features_and_orthonormal_directions() -> None:
    frame = public_frame(NETWORK, encoder(), images())
    assert frame.directions.shape == (DIRECTIONS, NETWORK.shape.features)
    assert np.allclose(frame.directions @ frame.directions.T, np.eye(DIRECTIONS), atol=1e-9)
    assert 0.1 < np.linalg.norm(frame.centre) <= 1


def test_a_plants_images_have_no_part_in_it_and_a_plant_without_any_has_the_same() -> None:
    first = public_frame(NETWORK, encoder(), images(seed=0))
    module._known.clear()
    none = TrainingSet.of(Images.none(32).train, Preprocessing(size=32))
    for other in (images(seed=1), none):
        again = public_frame(NETWORK, encoder(), other)
        assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
        module._known.clear()


def test_another_encoder_and_another_size_have_another_one() -> None:
    first = public_frame(NETWORK, encoder(), images())
    for other in (
        public_frame(NETWORK, encoder(1), images()),
        public_frame(NETWORK, encoder(), images(16)),
    ):
        assert not np.allclose(first.centre, other.centre)


def test_what_it_spans_hardly_depends_on_a_machines_rounding() -> None:
    """Where arithmetic differs by a millionth, as between processors,
    sums of all plants are still of one thing.
    """
    first = public_frame(NETWORK, encoder(), images())
    random = torch.Generator().manual_seed(0)
    rounded = {
        n: v * (1 + 1e-6 * torch.randn(v.shape, generator=random)) for n, v in encoder().items()
    }
    other = public_frame(NETWORK, rounded, images())
    apart = first.directions - first.directions @ other.directions.T @ other.directions
    assert np.linalg.norm(apart, axis=1).max() < 0.02
    assert np.linalg.norm(first.centre - other.centre) < 1e-4


def test_surfaces_differ_more_along_it_than_elsewhere() -> None:
    """Of plants that were not drawn for it."""
    pixels = draw_images(np.repeat(np.arange(len(CLASSES)), 4), 32, seed=7)
    data = images()._replace(
        images=torch.from_numpy(pixels).permute(0, 3, 1, 2),
        labels=torch.zeros(len(pixels), dtype=torch.int64),
    )
    features = encode_all(NETWORK, encoder(), data).astype(np.float64)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    apart = features - features.mean(0)
    frame = public_frame(NETWORK, encoder(), images())
    kept = np.square(apart @ frame.directions.T).sum() / np.square(apart).sum()
    assert kept > 0.8, "half of its dimensions"
