"""TEL, texture embedding learning (FedTFI, section 3.2):
a pre-norm transformer encoder over patches of maps.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

PATCH_SIDE = 2
"""Side of a patch, in positions of the maps."""


def cut_patches(maps: Tensor) -> Tensor:
    """Maps [n, C, h, w] -> their patches of PATCH x PATCH, row by row, [n, N, PATCH^2 * C]."""
    count, channels, height, width = maps.shape
    cells = maps.permute(0, 2, 3, 1).reshape(
        count, height // PATCH_SIDE, PATCH_SIDE, width // PATCH_SIDE, PATCH_SIDE, channels
    )
    return cells.transpose(2, 3).flatten(3).flatten(1, 2)


class Patches(nn.Module):
    """`cut_patches` as a part of a network."""

    def forward(self, maps: Tensor) -> Tensor:
        """Maps [n, C, h, w] -> [n, N, PATCH^2 * C]."""
        return cut_patches(maps)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        for layer in (self.qkv, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, N, width] -> [n, N, width]."""
        queries, keys, values = (
            self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        )
        seen = functional.scaled_dot_product_attention(queries, keys, values)
        return cast(Tensor, self.out(seen.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """One pre-norm transformer block, eqs. (4) and (5)."""

    def __init__(self, width: int, heads: int, ratio: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.hidden = nn.Linear(width, ratio * width)
        self.out = nn.Linear(ratio * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, N, width] -> [n, N, width]."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + cast(Tensor, self.out(functional.gelu(self.hidden(self.norm2(tokens)))))


class PositionalEmbedding(nn.Module):
    """A learnable token before the others, and learnable positions added to all, eq. (3)."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, count + 1, width) * 0.02)

    def forward(self, embedded: Tensor) -> Tensor:
        """[n, count, width] -> [n, count + 1, width]."""
        return torch.cat([self.token.expand_as(embedded[:, :1]), embedded], 1) + self.positions


class TextureEmbedding(nn.Module):
    """Embedded patches with positions, through transformer blocks and a final LayerNorm.

    The paper does not mention the final LayerNorm. Every pre-norm encoder has one; without it the
    triplet loss would compare tokens of arbitrary length.
    """

    def __init__(self, channels: int, count: int, width: int, depth: int, heads: int, ratio: int):
        super().__init__()
        self.embed = nn.Linear(channels * PATCH_SIDE**2, width)
        self.place = PositionalEmbedding(count, width)
        self.blocks = nn.Sequential(*(Block(width, heads, ratio) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [n, channels, h, w] of `count` patches -> the output token [n, width],
        the others [n, count, width].
        """
        tokens = self.norm(self.blocks(self.place(self.embed(cut_patches(maps)))))
        return tokens[:, 0], tokens[:, 1:]
