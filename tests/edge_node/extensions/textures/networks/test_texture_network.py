"""FedTFI's network and its parts: what the paper says of them,
worked out by hand or by torch's own layers.
"""

import math
from importlib.metadata import entry_points

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_node.extensions.textures.networks import texture_presets
from edge_node.extensions.textures.networks.musten import Codebook, KeywordAttention, MultiScale
from edge_node.extensions.textures.networks.tel import Block, TextureEmbedding, cut_patches
from trainer.models import backbones
from trainer.models.catalogue import KNOWN
from trainer.models.named_tensors import add_prefix, is_frozen, is_trainable
from trainer.models.network import Network

OURS = ("fedtfi", "fedtfi_small", "tel_small", "musten_small", "maps_small")
SMALL = OURS[1:]
seeds = pytest.mark.parametrize("seed", [1, 2])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Table 1


def test_the_papers_network_has_the_shapes_of_table_1() -> None:
    """But for MusTEN's rows: the table prints 112, and codebooks of 8, 16,
    32 and 64 words have 120.
    """
    with torch.device("meta"):
        network, image = backbones.build("fedtfi"), torch.empty(1, 3, 224, 224)
    gave: dict[str, tuple[int, ...]] = {}
    for name, module in network.named_modules():
        module.register_forward_hook(
            lambda module, seen, out, name=name: (
                gave.update({name: tuple(out.shape)}) if torch.is_tensor(out) else None
            )
        )
    features = network(image)
    assert gave["project"] == (1, 64, 56, 56)
    assert cut_patches(torch.empty(gave["project"], device="meta")).shape == (1, 784, 256)
    assert gave["tel.embed"] == (1, 784, 1024)
    assert gave["tel.blocks"] == (1, 784 + 1, 1024)
    assert gave["encoding.reduce"] == (1, 784, 128)
    assert gave["encoding.musten"] == gave["encoding.attention"] == (1, 8 + 16 + 32 + 64, 128)
    assert nn.Linear(features.shape[1], 7, device="meta")(features).shape == (1, 7)
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    assert [block.attention.heads for block in blocks] == [8] * 10


@pytest.mark.parametrize("model", OURS)
def test_presets_have_the_features_and_the_size_that_they_state(model: str) -> None:
    preset = KNOWN[model]
    with torch.device("meta"):
        encoder = preset.build()
        features = encoder(torch.empty(2, 3, preset.size, preset.size))
    assert features.shape == (2, preset.features)
    assert sum(value.numel() for value in encoder.state_dict().values()) == preset.values


def test_twenty_networks_are_registered() -> None:
    registered = entry_points(group="edge_node.encoders")
    names = {each.name for each in registered if each.module == texture_presets.__name__}
    assert len(names) == 20
    assert all(KNOWN[name].only_size and KNOWN[name].beginning for name in names)


@pytest.mark.parametrize("model", SMALL)
def test_training_runs_the_modules_and_leaves_a_stem_without_gradients(model: str) -> None:
    torch.manual_seed(3)
    built = backbones.build(model).double()
    state = {
        name: value.clone() for name, value in add_prefix("encoder", built.state_dict()).items()
    }
    tensors = {name: value.requires_grad_(is_trainable(name)) for name, value in state.items()}
    images, network = normal(2, 3, 64, 64, seed=4), Network(model, 3)
    theirs, mine = built(images), network.encode(tensors, network.apply_stem(tensors, images))
    torch.testing.assert_close(mine, theirs)
    direction = normal(*theirs.shape, seed=5)
    theirs.backward(direction)
    mine.backward(direction)
    for name, value in built.named_parameters():
        expected = None if is_frozen(name) else value.grad
        torch.testing.assert_close(tensors[f"encoder.{name}"].grad, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "model", ["fedtfi_small", "tel_deepten_small", "tel_dep_small", "tel_class_small"]
)
def test_parts_one_after_another_are_the_network(model: str) -> None:
    torch.manual_seed(6)
    network = Network(model, 3)
    tensors = add_prefix("encoder", backbones.build(model).state_dict())
    seen = network.apply_stem(tensors, normal(2, 3, 64, 64, seed=6, dtype=torch.float32))
    assert seen.shape == (2, 128, 16, 16)
    maps = network.part("project", tensors, seen)
    token, tokens = network.part("tel", tensors, maps)
    assert (maps.shape, token.shape, tokens.shape) == ((2, 64, 16, 16), (2, 128), (2, 64, 128))
    assert torch.equal(network.part("encoding", tensors, tokens), network.encode(tensors, seen))


# TEL


def test_patches_are_taken_row_by_row_with_all_their_channels() -> None:
    maps = torch.arange(2 * 2 * 4 * 6).reshape(2, 2, 4, 6)
    cut = cut_patches(maps)
    assert cut.shape == (2, 6, 8)
    for image in range(2):
        for place in range(6):
            row, column = 2 * (place // 3), 2 * (place % 3)
            square = maps[image, :, row : row + 2, column : column + 2]
            assert sorted(cut[image, place].tolist()) == sorted(square.flatten().tolist())


@seeds
def test_a_texture_embedding_is_torchs_pre_norm_transformer_behind_token_and_positions(
    seed: int,
) -> None:
    torch.manual_seed(seed)
    width, depth, heads, ratio = 16, 2, 4, 3
    tel = TextureEmbedding(
        channels=3, count=6, width=width, depth=depth, heads=heads, ratio=ratio
    ).double()
    for value in tel.parameters():  # norms and biases too: none is 0 or 1
        nn.init.normal_(value, 0.3, 0.3)
    layers = []
    for block in tel.blocks:
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            ratio * width,
            dropout=0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        ).double()
        ours = block.state_dict()
        theirs = {"self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out."}
        theirs |= {
            "linear1.": "hidden.",
            "linear2.": "out.",
            "norm1.": "norm1.",
            "norm2.": "norm2.",
        }
        layer.load_state_dict(
            {
                f"{old}{kind}": ours[f"{new}{kind}"]
                for old, new in theirs.items()
                for kind in ("weight", "bias")
            }
        )
        layers.append(layer)
    maps = normal(2, 3, 4, 6, seed=seed)
    embedded = functional.linear(cut_patches(maps), tel.embed.weight, tel.embed.bias)
    tokens = torch.cat([tel.place.token.expand(2, 1, width), embedded], 1) + tel.place.positions
    for layer in layers:
        tokens = layer(tokens)
    expected = functional.layer_norm(tokens, (width,), tel.norm.weight, tel.norm.bias)
    token, others = tel(maps)
    torch.testing.assert_close(torch.cat([token[:, None], others], 1), expected)


# MusTEN


def codebook(
    words: list[list[float]], smoothing: list[float], *, squared: bool = False
) -> Codebook:
    made = Codebook(len(words), len(words[0]), squared=squared)
    made.load_state_dict({"words": torch.tensor(words), "smoothing": torch.tensor(smoothing)})
    return made


def test_residuals_are_summed_by_their_share_of_each_word() -> None:
    """Distances 1 and 2 of the first descriptor, 4 and 5 of the second;
    smoothing ln 2 makes them powers of 1/2.
    """
    one = codebook([[1.0, 0.0], [-2.0, 0.0]], [math.log(2)] * 2)
    encoded = one(torch.tensor([[[0.0, 0.0], [1.0, 4.0]]]))
    torch.testing.assert_close(encoded, torch.tensor([[[-2 / 3, 8 / 3], [5 / 3, 4 / 3]]]))


def test_every_word_has_a_smoothing_of_its_own() -> None:
    """Weights 2^-1 and 4^-2 of the first descriptor, 2^-4 and 4^-5 of the second."""
    one = codebook([[1.0, 0.0], [-2.0, 0.0]], [math.log(2), math.log(4)])
    first, second = 8 / 9, 64 / 65
    expected = [[-first, 4 * second], [2 * (1 - first) + 3 * (1 - second), 4 * (1 - second)]]
    torch.testing.assert_close(
        one(torch.tensor([[[0.0, 0.0], [1.0, 4.0]]])), torch.tensor([expected])
    )


@seeds
def test_one_codebook_with_squared_distances_is_deep_tens_encoding_layer(seed: int) -> None:
    """Zhang et al. (2017), eqs. (2) and (3), descriptor by descriptor and word by word."""
    torch.manual_seed(seed)
    layer = MultiScale((5,), 7, squared=True).double()
    (words, smoothing), descriptors = (
        (value.detach() for value in layer.parameters()),
        normal(2, 9, 7, seed=seed),
    )
    expected = torch.zeros(2, 5, 7, dtype=torch.float64)
    for image in range(2):
        for descriptor in descriptors[image]:
            scores = [
                math.exp(-float(s * (descriptor - c).square().sum()))
                for c, s in zip(words, smoothing, strict=True)
            ]
            for word in range(5):
                expected[image, word] += scores[word] / sum(scores) * (descriptor - words[word])
    torch.testing.assert_close(layer(descriptors), expected)


@seeds
def test_codebooks_of_several_sizes_stand_one_below_the_other(seed: int) -> None:
    torch.manual_seed(seed)
    layer, descriptors = MultiScale((2, 4, 8), 6), normal(3, 10, 6, seed=seed, dtype=torch.float32)
    encoded = layer(descriptors)
    assert encoded.shape == (3, 14, 6)
    for start, one in zip((0, 2, 6), layer.codebooks, strict=True):
        assert torch.equal(encoded[:, start : start + len(one.words)], one(descriptors))


@pytest.mark.parametrize("squared", [False, True])
def test_a_descriptor_that_is_a_word_has_finite_gradients(squared: bool) -> None:
    one = codebook([[3.0, 4.0], [-1.0, 7.0]], [1.0, 1.0], squared=squared)
    descriptors = torch.tensor([[[3.0, 4.0], [-1.0, 7.0]]], requires_grad=True)
    one(descriptors).square().sum().backward()
    assert descriptors.grad is not None
    assert descriptors.grad.isfinite().all()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in one.parameters())


# KCA


def test_keyword_attention_scales_each_row_by_its_share() -> None:
    """V looks at the first number alone; w makes the score of 1 ln 3 and that of 0 nothing:
    shares 3/4 and 1/4.
    """
    attention = KeywordAttention(2, 1)
    attention.load_state_dict(
        {
            "hidden.weight": torch.tensor([[1.0, 0.0]]),
            "score.weight": torch.tensor([[math.log(3) / math.tanh(1)]]),
        }
    )
    scaled = attention(torch.tensor([[[1.0, 8.0], [0.0, 4.0]]]))
    torch.testing.assert_close(scaled, torch.tensor([[[0.75, 6.0], [0.0, 1.0]]]))
