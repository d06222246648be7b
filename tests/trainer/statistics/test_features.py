"""Features of images for sums: unit vectors, eight views, each image's its own."""

import numpy as np
import pytest
import torch

from broker_config.protocol.messages import Preprocessing
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, Tensors, to_tensors
from trainer.statistics.features import view_features
from trainer.statistics.sums import VIEWS

SIZE = 32


@pytest.fixture(scope="module")
def encoder() -> tuple[Network, Tensors]:
    return Network("mobilenet_v2", 2), to_tensors(
        initial_encoder("mobilenet_v2", "surface", seed=0)
    )


def images(count: int) -> np.ndarray:
    """Noise that differs from pixel to pixel, uint8 [n, S, S, 3]."""
    return np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def training_set(pictures: np.ndarray) -> TrainingSet:
    labels, names = np.zeros(len(pictures), int), ("",) * len(pictures)
    return TrainingSet.of(LabelledImages(pictures, labels, names, names), Preprocessing(size=SIZE))


def features(encoder: tuple[Network, Tensors], pictures: np.ndarray) -> np.ndarray:
    return view_features(*encoder, training_set(pictures))


def test_views_are_the_squares_symmetries_and_the_image_itself_comes_first(
    encoder: tuple[Network, Tensors],
):
    picture = images(1)[0]
    turned = [np.rot90(picture, turns) for turns in range(4)]
    symmetries = np.ascontiguousarray([*turned, *(np.flipud(each) for each in turned)])
    alone = features(encoder, symmetries)[:, 0]
    views = features(encoder, picture[None])[0]
    nearest = np.linalg.norm(views[:, None] - alone[None], axis=2)
    assert nearest.argmin(1)[0] == 0
    assert sorted(nearest.argmin(1)) == list(range(VIEWS))
    assert nearest.min(1).max() < 1e-5
    assert np.median(nearest) > 0.01


def test_every_view_has_length_one(encoder: tuple[Network, Tensors]):
    assert np.allclose(np.linalg.norm(features(encoder, images(3)), axis=2), 1, atol=1e-6)


def test_the_first_view_is_the_encoders_answer_to_the_image(encoder: tuple[Network, Tensors]):
    network, tensors = encoder
    with torch.no_grad():
        plain = network.encode(tensors, training_set(images(3)).network_input(slice(None))).numpy()
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.allclose(features(encoder, images(3))[:, 0], plain, atol=1e-5)


def test_no_bit_depends_on_which_other_images_there_are(encoder: tuple[Network, Tensors]):
    together = features(encoder, images(5))
    assert np.array_equal(together[[1, 4]], features(encoder, images(5)[[1, 4]]))
    assert features(encoder, images(0)).shape == (0, VIEWS, encoder[0].shape.features)
