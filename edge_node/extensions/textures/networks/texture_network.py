"""Texture networks as sequences of named parts; FedTFI's network, with all of its parts or some."""

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from edge_node.extensions.textures.networks.musten import Codebook, KeywordAttention, MultiScale
from edge_node.extensions.textures.networks.sizes import Tel
from edge_node.extensions.textures.networks.stem import STEM_CHANNELS, Stem
from edge_node.extensions.textures.networks.tel import PATCH_SIDE, Patches, TextureEmbedding
from edge_node.extensions.textures.networks.trunk import Head
from trainer.models.encoders.encoder_module import EncoderModule, Evidence

MAP_CHANNELS = 64
"""Channels of FedTFI's maps, from which patches are cut."""


class TextureNetwork(EncoderModule):
    """A sequence of named parts, the last of which is a head.

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

    def without_stem(self) -> "TextureNetwork":
        """Return the network that takes what the stem gives; this one if it has no stem."""
        parts = dict(self.named_children())
        return TextureNetwork(parts) if parts.pop("stem", None) else self

    def explain(self, inputs: Tensor) -> tuple[Tensor, Evidence | None]:
        """Return the features of what the stem gives, or of images, and the head's evidence."""
        parts = [(name, part) for name, part in self.named_children() if name != "stem"]
        *before, (_, head) = parts
        for name, part in before:
            inputs = part(inputs)
            if name == "tel":
                inputs = inputs[1]
        return cast(Head, head).explain(inputs)


class CodebookHead(Head):
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

    def explain(self, inputs: Tensor) -> tuple[Tensor, Evidence | None]:
        """Return the features of tokens, and what the descriptor of each adds to each class.

        MusTEN's codes are sums over descriptors; what follows is linear, with the image's own
        attention, norm and ReLU. These are held fixed, so a map shows what a descriptor contributes
        to this output, not the output without it.
        """
        descriptors = self.reduce(inputs)  # [n, N, D]
        codebooks = [cast(Codebook, each) for each in self.musten.codebooks]
        shares = torch.cat([codebook.assign(descriptors) for codebook in codebooks], 2)  # [n, N, K]
        words = torch.cat([codebook.words for codebook in codebooks])  # [K, D]
        encoded = shares.mT @ descriptors - shares.sum(1).unsqueeze(2) * words
        weights = self.attention.attention_weights(encoded)  # [n, K, 1]
        rows = (weights * encoded).flatten(1)
        hidden = self.hidden(self.norm(rows))

        def evidence(head: Tensor) -> Tensor:
            back = (_through_relu(head, hidden) @ self.hidden.weight) * self.norm.weight
            deviation = (rows.var(1, correction=0) + self.norm.eps).sqrt()
            back = (back - back.mean(2, keepdim=True)) / deviation[:, None, None]
            back = back.unflatten(2, words.shape) * weights.unsqueeze(1)  # [n, classes, K, D]
            # [n, classes, K, N]
            residuals = back @ descriptors.mT.unsqueeze(1) - (back * words).sum(3, keepdim=True)
            added = (residuals * shares.mT.unsqueeze(1)).sum(2) * inputs.shape[1]
            shift = self.hidden.weight @ self.norm.bias + self.hidden.bias
            return _to_square(added + _constant_evidence(head, hidden, shift))

        return torch.relu(hidden), evidence


class PooledHead(Head):
    """The mean of tokens [n, N, inputs], through a hidden layer."""

    def __init__(self, inputs: int, features: int):
        super().__init__()
        self.hidden = nn.Linear(inputs, features)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, N, inputs] -> features [n, features]."""
        return torch.relu(self.hidden(tokens.mean(1)))

    def explain(self, inputs: Tensor) -> tuple[Tensor, Evidence | None]:
        """Return the features of tokens, and what each of them adds to each class."""
        hidden = self.hidden(inputs.mean(1))

        def evidence(head: Tensor) -> Tensor:
            back = _through_relu(head, hidden) @ self.hidden.weight
            return _to_square(back @ inputs.mT + _constant_evidence(head, hidden, self.hidden.bias))

        return torch.relu(hidden), evidence


def _through_relu(head: Tensor, hidden: Tensor) -> Tensor:
    """The part of a head [(n,) classes, features] that passes the ReLU after `hidden` [n,
    features].
    """
    return head * (hidden > 0).unsqueeze(1)


def _constant_evidence(head: Tensor, hidden: Tensor, shift: Tensor) -> Tensor:
    """The evidence that no place contributes, [n, classes, 1]."""
    return (_through_relu(head, hidden) @ shift).unsqueeze(2)


def _to_square(added: Tensor) -> Tensor:
    """[n, classes, N] -> [n, classes, h, w], row by row, in the order of patches."""
    side = math.isqrt(added.shape[2])
    return added.reshape(*added.shape[:2], side, side)


def build(
    size: int, features: int, tel: Tel | None, codebooks: tuple[int, ...], depth: int
) -> TextureNetwork:
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
