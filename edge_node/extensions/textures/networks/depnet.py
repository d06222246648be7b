"""DEPNet: texture encoding and global average pooling, merged bilinearly (Xue, Zhang, Dana,
CVPR 2018).
"""

from torch import Tensor, nn

from edge_node.extensions.textures.networks.deepten import DeepTenHead
from edge_node.extensions.textures.networks.trunk import (
    GlobalAveragePooling,
    Head,
    Stages,
    scale_to_length,
)


class DepNetHead(Head):
    """Bilinear product of two views of the deepest maps, each of width `side` (section 3).

    The first view is orderless (an encoding layer), the second spatial (means); their outer product
    is scaled to one length and mapped to the features.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        codewords: int,
        side: int,
        features: int,
        length: float,
        *,
        batch_norm: bool,
    ):
        super().__init__()
        self.texture = nn.Sequential(
            DeepTenHead(channels, width, codewords, length, batch_norm=batch_norm),
            nn.Linear(codewords * width, side),
            nn.LayerNorm(side),
        )
        self.pooled = nn.Sequential(
            GlobalAveragePooling(), nn.Linear(channels, side), nn.LayerNorm(side)
        )
        self.merged = nn.Linear(side * side, features)
        self._length = length

    def forward(self, stages: Stages) -> Tensor:
        """Stages -> features [n, features] of the deepest."""
        products = multiply_outer(self.texture(stages), self.pooled(stages))
        return scale_to_length(self.merged(scale_to_length(products, self._length)), self._length)


def multiply_outer(first: Tensor, second: Tensor) -> Tensor:
    """Row-wise outer products, [n, a] and [n, b] -> [n, a * b]."""
    return (first.unsqueeze(2) * second.unsqueeze(1)).flatten(1)
