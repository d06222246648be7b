"""The networks that FedTFI's is compared with: each head does what its paper says,
and each preset learns.
"""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional

from broker_config.protocol.errors import UsageError
from edge_node.extensions.textures.networks.class_statistics import (
    LEVELS,
    SIDES,
    ClassHead,
    SoftHistogram,
    local_dimension,
)
from edge_node.extensions.textures.networks.cunet import CUNetHead, Unmixing
from edge_node.extensions.textures.networks.deepten import DeepTenHead
from edge_node.extensions.textures.networks.depnet import DepNetHead, multiply_outer
from edge_node.extensions.textures.networks.texture_weights import rename_pretrained
from edge_node.extensions.textures.networks.trunk import (
    GlobalAveragePooling,
    TokenHead,
    scale_to_length,
)
from trainer.models import backbones
from trainer.models.catalogue import KNOWN
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import add_prefix, is_trainable
from trainer.models.network import Network, to_tensors

pytestmark = pytest.mark.slow

CHANNELS = 8  # of the maps in these tests, 4 x 4 positions
HEADS: dict[str, Callable[[], nn.Module]] = {
    "resnet": GlobalAveragePooling,
    "deepten": lambda: DeepTenHead(CHANNELS, 8, 3, 2.0, batch_norm=False),
    "dep": lambda: DepNetHead(CHANNELS, 8, 3, 4, 6, 2.0, batch_norm=False),
    "class": lambda: ClassHead((CHANNELS,) * 3, 4, 5, 1),
    "cunet": lambda: CUNetHead(CHANNELS, 8, 3, 2.0, batch_norm=False),
}
heads = pytest.mark.parametrize("name", HEADS)
SMALL = ("resnet", "deepten", "dep", "class", "cunet", "tel_deepten", "tel_dep", "tel_class")
PAPER = (
    "deepten_resnet18",
    "deepten_resnet50",
    "dep_resnet18",
    "dep_resnet50",
    "class_resnet18",
    "class_resnet50",
    "cunet",
)


def drawn(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return HEADS[name]()


def maps(seed: int) -> Tensor:
    return torch.randn(3, CHANNELS, 4, 4, generator=torch.Generator().manual_seed(seed))


# Deep-TEN


@pytest.mark.parametrize("seed", [1, 2])
def test_deep_ten_sums_softly_assigned_residuals(seed: int) -> None:
    head, seen = drawn("deepten", seed), maps(seed)
    inner = head.get_submodule("reduce")(seen).detach().double().numpy()
    words, smoothing = (
        value.detach().double().numpy() for value in head.get_submodule("encoding").parameters()
    )
    expected = np.zeros((3, 3, 8))
    for image, row, column in product(range(3), range(4), range(4)):
        x = inner[image, :, row, column]
        weights = np.array(
            [math.exp(-smoothing[k] * ((x - words[k]) ** 2).sum()) for k in range(3)]
        )
        for k in range(3):
            expected[image, k] += weights[k] / weights.sum() * (x - words[k])
    expected = expected.reshape(3, -1)
    expected *= 2 / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(head([seen]).detach().numpy(), expected, atol=1e-5)


def test_normalised_features_have_the_length_asked_for_and_no_features_stay_none() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(
        scale_to_length(vectors, 10.0), torch.tensor([[6.0, 8.0], [0.0, 0.0]])
    )


# DEPNet


def test_dep_multiplies_every_two_numbers_of_its_two_views() -> None:
    assert multiply_outer(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])).tolist() == [
        [3, 4, 5, 6, 8, 10]
    ]


def test_dep_without_either_view_has_a_constant_feature_vector() -> None:
    """Where one factor of every product is zero, the maps no longer matter:
    both branches take part in all of it.
    """
    for branch in ("texture.2", "pooled.2"):
        head = drawn("dep", 3)
        nn.init.zeros_(head.get_submodule(branch).weight)
        torch.testing.assert_close(head([maps(1)]), head([maps(2)]))
    head = drawn("dep", 3)
    assert (head([maps(1)]) - head([maps(2)])).abs().max() > 0.01


# CLASSNet


def naive_dimension(volume: np.ndarray, at: tuple[int, ...]) -> float:
    """Of one channel's volume [layers, h, w], by the definition and numpy's least squares."""
    counts = []
    for side in SIDES:
        window = volume[tuple(slice(max(0, i - side // 2), i + side // 2 + 1) for i in at)]
        counts.append((window.max() - window.min()) * LEVELS / side + 1)
    return float(3 + np.polyfit(np.log([1 / side for side in SIDES]), np.log(counts), 1)[0])


def test_the_local_dimension_is_the_slope_of_box_counts() -> None:
    volume = np.random.default_rng(4).normal(size=(3, 9, 9))
    measured = local_dimension(torch.from_numpy(volume)[None, None])[0, 0]
    for at in [(0, 0, 0), (1, 4, 4), (2, 8, 3), (1, 2, 7)]:
        assert measured[at].item() == pytest.approx(naive_dimension(volume, at), abs=1e-9)


def test_a_flat_volume_has_three_dimensions_a_slope_as_many_and_noise_nearly_four() -> None:
    flat = torch.zeros(1, 1, 3, 16, 16)
    slope = torch.arange(16.0).expand(1, 1, 3, 16, 16)
    noise = 10 * torch.rand(1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    inside = (0, 0, 1, slice(4, 12), slice(4, 12))
    torch.testing.assert_close(local_dimension(flat), torch.full_like(flat, 3))
    # a window of side 3 spans two steps, of side 7 six
    assert 2.6 < local_dimension(slope)[inside].mean() < 3.0
    assert 3.7 < local_dimension(noise)[inside].mean() < 4.0


def test_a_histogram_with_narrow_bins_counts() -> None:
    histogram = SoftHistogram(1, 4, 3.0, 4.5)  # bins about 3, 3.5, 4 and 4.5
    nn.init.constant_(histogram.sharpness, 1e3)
    counted = histogram(torch.tensor([[[3.1, 3.45, 3.6, 4.4]]]))
    # shares 1/4, 2/4, 0, 1/4, as an excess over 1/4 each
    assert counted.tolist() == [[[0, 1, -1, 0]]]


# CU-Net


@pytest.mark.parametrize("seed", [6, 7])
def test_what_is_unmixed_sums_to_the_mean_descriptor(seed: int) -> None:
    torch.manual_seed(seed)
    unmixing, descriptors = Unmixing(5, 3), torch.randn(2, 7, 5)
    torch.testing.assert_close(unmixing(descriptors).sum(1), descriptors.mean(1))


def test_a_component_gets_the_descriptors_that_are_its_own() -> None:
    unmixing = Unmixing(2, 2)
    with torch.no_grad():
        unmixing.shares.weight.copy_(torch.tensor([[99.0, 0.0], [0.0, 99.0]]))
        unmixing.shares.bias.zero_()
    descriptors = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 4.0], [0.0, 8.0]]])
    torch.testing.assert_close(unmixing(descriptors), torch.tensor([[[1.0, 0.0], [0.0, 3.0]]]))


# All heads


@heads
def test_positions_have_no_order_except_for_local_dimensions(name: str) -> None:
    head, seen = drawn(name, 8), maps(8)
    shuffled = seen.flatten(2)[
        :, :, torch.randperm(16, generator=torch.Generator().manual_seed(9))
    ].view_as(seen)
    moved = (head([seen] * 3) - head([shuffled] * 3)).abs().max()
    assert (moved < 1e-5) == (name != "class")


@heads
def test_gradients_are_finite_for_constant_maps(name: str) -> None:
    for value in (0.0, 1.0):
        head = drawn(name, 10)
        seen = torch.full((2, CHANNELS, 4, 4), value, requires_grad=True)
        features = head([seen] * 3)
        features.sum().backward()
        for tensor in (features, seen.grad, *(each.grad for each in head.parameters())):
            assert tensor is not None
            assert tensor.isfinite().all()


def test_a_head_sees_tokens_as_the_grid_that_they_come_from() -> None:
    seen = maps(11)
    head = drawn("class", 11)
    torch.testing.assert_close(TokenHead(head, 4, 3)(seen.flatten(2).mT), head([seen] * 3))


# The presets


def test_paper_presets_have_the_features_and_the_size_that_they_state() -> None:
    for name in PAPER:
        with torch.device("meta"):
            encoder = backbones.build(name)
        assert sum(value.numel() for value in encoder.state_dict().values()) == KNOWN[name].values
        if name in ("dep_resnet18", "class_resnet50", "cunet"):
            features = encoder(torch.empty(2, 3, KNOWN[name].size, KNOWN[name].size, device="meta"))
            assert features.shape == (2, KNOWN[name].features)


def test_a_paper_preset_begins_with_its_trunks_file_and_is_drawn_from_there_on(
    tmp_path: Path,
) -> None:
    trunk = backbones.draw("resnet18", 15)
    save_file(trunk, tmp_path / "trunk.safetensors")
    begun = initial_encoder("deepten_resnet18", str(tmp_path / "trunk.safetensors"), 16)
    drawn = initial_encoder("deepten_resnet18", "none", 16)
    for name, value in begun.items():
        given = trunk.get(name.removeprefix("encoder.trunk."), drawn[name])
        assert np.array_equal(value, given), name
    del trunk["layer4.1.bn2.weight"]
    save_file(trunk, tmp_path / "part.safetensors")
    with pytest.raises(UsageError, match=r"part\.safetensors"):
        initial_encoder("deepten_resnet18", str(tmp_path / "part.safetensors"), 16)


def test_the_names_of_downloaded_densely_connected_layers_are_their_modules() -> None:
    layer = "features.denseblock1.denselayer2"
    downloaded = {f"{layer}.norm.1.weight": np.ones(1), f"{layer}.conv.2.weight": np.ones(1)}
    assert rename_pretrained(downloaded, stem=False).keys() == {
        f"trunk.{layer}.norm1.weight",
        f"trunk.{layer}.conv2.weight",
    }
    assert (
        rename_pretrained(downloaded, stem=False).keys()
        <= backbones.build("cunet").state_dict().keys()
    )


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_without_a_convolution_before_it_runs_as_its_module_does(
    training: bool,
) -> None:
    """DenseNet normalises what several convolutions have given.

    In double precision, as kinks blow up rounding.
    """
    torch.manual_seed(12)
    encoder = backbones.build("cunet").double().train(training)
    tensors = add_prefix(
        "encoder", {name: value.clone() for name, value in encoder.state_dict().items()}
    )
    images = torch.randn(3, 3, 64, 64, dtype=torch.double)
    with torch.no_grad():
        torch.testing.assert_close(
            Network("cunet", 2).encode(tensors, images, training=training), encoder(images)
        )
    for name, value in encoder.named_buffers():
        torch.testing.assert_close(tensors[f"encoder.{name}"], value)


@pytest.fixture(scope="module")
def textures() -> tuple[Tensor, Tensor]:
    """What a stem could have made of 48 images,
    lying or standing stripes at any phase with noise, and their labels.
    """
    random = torch.Generator().manual_seed(13)
    labels = torch.arange(48) % 2
    waves = torch.sin(1.5 * torch.arange(16.0) + 6.3 * torch.rand(48, 1, generator=random))
    lying, standing = (waves.unsqueeze(axis).expand(48, 16, 16) for axis in (1, 2))
    images = torch.where(labels[:, None, None] == 0, lying, standing) + 0.3 * torch.randn(
        48, 16, 16, generator=random
    )
    filters = torch.randn(128, 1, 3, 3, generator=random)
    return functional.conv2d(images.unsqueeze(1), filters, padding=1).relu(), labels


@pytest.mark.parametrize("name", SMALL)
def test_a_small_preset_learns_two_textures_in_a_few_steps(
    name: str, textures: tuple[Tensor, Tensor]
) -> None:
    model = f"{name}_small"
    network, (seen, labels) = Network(model, 2), textures
    tensors = to_tensors(
        {f"encoder.{key}": value for key, value in backbones.draw(model, 14).items()}
    )
    tensors |= {
        "classifier.weight": torch.zeros(2, network.shape.features),
        "classifier.bias": torch.zeros(2),
    }
    moved = [value.requires_grad_() for key, value in tensors.items() if is_trainable(key)]
    optimiser = torch.optim.SGD(moved, 0.01, momentum=0.9)
    for step in range(10):
        batch = slice(16 * (step % 2), 16 * (step % 2) + 16)
        logits = network.linear(tensors, "classifier", network.encode(tensors, seen[batch]))
        optimiser.zero_grad()
        network.cross_entropy(logits, labels[batch]).backward()
        optimiser.step()
    with torch.no_grad():
        predicted = network.linear(
            tensors, "classifier", network.encode(tensors, seen[32:])
        ).argmax(1)
    assert (predicted == labels[32:]).float().mean() > 0.9


@pytest.mark.parametrize("name", SMALL)
def test_a_small_preset_mapped_over_nodes_gives_each_node_its_own(
    name: str, textures: tuple[Tensor, Tensor]
) -> None:
    model, seen = f"{name}_small", textures[0][:4].unflatten(0, (2, 2))
    alone, trees = Network(model, 2), [to_tensors(backbones.draw(model, seed)) for seed in (17, 18)]
    nodes = [{f"encoder.{key}": value for key, value in tensors.items()} for tensors in trees]
    stacked = {key: torch.stack([node[key] for node in nodes]) for key in nodes[0]}
    together = torch.func.vmap(alone.mapped().encode)(stacked, seen)
    for node, images, features in zip(nodes, seen, together, strict=True):
        torch.testing.assert_close(features, alone.encode(node, images), rtol=1e-4, atol=1e-4)
