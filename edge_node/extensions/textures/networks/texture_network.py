"""Texture networks as sequences of named parts; FedTFI's network, with all of its parts or some."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from edge_node.extensions.textures.networks.musten import KeywordAttention, MultiScale
from edge_node.extensions.textures.networks.sizes import Tel
from edge_node.extensions.textures.networks.stem import STEM_CHANNELS, Stem
from edge_node.extensions.textures.networks.tel import PATCH_SIDE, Patches, TextureEmbedding

MAP_CHANNELS = 64
"""Channels of FedTFI's maps, from which patches are cut."""


class TextureNetwork(nn.Module):
    """A sequence of named parts.

    Of the outputs of `tel`, the tokens are passed on, not the output token.
    """

    def __init__(self, parts: Mapping[str, nn.Module]):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, inputs: Tensor) -> Tensor:
        """Input of the first part -> features [n, features]."""
        for name, part in self.named_children():
            inputs = part(inputs)
            if name == "tel":
                inputs = inputs[1]
        return inputs


def remove_stem(encoder: nn.Module) -> nn.Module:
    """The encoder without its stem; unchanged if it has none."""
    parts = dict(encoder.named_children())
    return TextureNetwork(parts) if parts.pop("stem", None) else encoder


class CodebookHead(nn.Module):
    """Tokens -> MusTEN -> KCA -> a hidden layer:
    descriptors are reduced to `depth` numbers by a 1 x 1 convolution.
    """

    def __init__(self, inputs: int, codebooks: tuple[int, ...], depth: int, features: int):
        super().__init__()
        self.reduce = nn.Linear(inputs, depth)  # a 1 x 1 convolution over tokens
        self.musten = MultiScale(codebooks, depth)
        self.attention = KeywordAttention(depth, depth)
        self.norm = nn.LayerNorm(sum(codebooks) * depth)
        self.hidden = nn.Linear(sum(codebooks) * depth, features)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, N, inputs] -> features [n, features]."""
        encoded = self.attention(self.musten(self.reduce(tokens)))
        return torch.relu(self.hidden(self.norm(encoded.flatten(1))))


class PooledHead(nn.Module):
    """The mean of tokens [n, N, inputs], through a hidden layer."""

    def __init__(self, inputs: int, features: int):
        super().__init__()
        self.hidden = nn.Linear(inputs, features)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, N, inputs] -> features [n, features]."""
        return torch.relu(self.hidden(tokens.mean(1)))


def build(
    size: int, features: int, tel: Tel | None, codebooks: tuple[int, ...], depth: int
) -> nn.Module:
    """FedTFI's network for images of `size` pixels;
    without `tel` or `codebooks` that part is left out.
    """
    count = (size // 4 // PATCH_SIDE) ** 2
    width = tel.width if tel else MAP_CHANNELS * PATCH_SIDE**2
    layers = {"tel": TextureEmbedding(MAP_CHANNELS, count, *tel)} if tel else {"patches": Patches()}
    encoding = (
        CodebookHead(width, codebooks, depth, features)
        if codebooks
        else PooledHead(width, features)
    )
    return TextureNetwork(
        {
            "stem": Stem(),
            "project": nn.Conv2d(STEM_CHANNELS, MAP_CHANNELS, 1),
            **layers,
            "encoding": encoding,
        }
    )
