"""Deep-TEN: an encoding layer of learned codewords on a convolutional trunk (Zhang, Xue,
Dana, CVPR 2017).
"""

from typing import cast

from torch import Tensor

from edge_node.extensions.textures.networks.musten import Codebook
from edge_node.extensions.textures.networks.trunk import (
    Head,
    Pointwise,
    Stages,
    scale_to_length,
    to_descriptors,
)


class DeepTenHead(Head):
    """1 x 1 convolution, encoding layer, length normalisation:
    the network's features before its linear classifier.
    """

    def __init__(
        self, channels: int, width: int, codewords: int, length: float, *, batch_norm: bool
    ):
        super().__init__()
        self.reduce = Pointwise(channels, width, batch_norm=batch_norm)
        self.encoding = Codebook(codewords, width, squared=True)
        self._length = length

    def forward(self, stages: Stages) -> Tensor:
        """Stages -> features [n, codewords * width] of the deepest."""
        descriptors = to_descriptors(cast(Tensor, self.reduce(stages[-1])))
        return scale_to_length(self.encoding(descriptors).flatten(1), self._length)
