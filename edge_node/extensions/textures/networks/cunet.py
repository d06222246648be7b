"""CU-Net-like head: the features of a fabric, unmixed into those of its components
(Feng et al., IJCV 2019).
"""

from typing import cast

import torch
from torch import Tensor, nn

from edge_node.extensions.textures.networks.trunk import (
    Head,
    Pointwise,
    Stages,
    scale_to_length,
    to_descriptors,
)


class Unmixing(nn.Module):
    """Soft assignment of every position's descriptor to components,
    with positive shares that sum to one.

    A component's representation is the mean over positions of its share of the descriptor. The
    representations sum to the mean descriptor, so nothing is lost, and a component that hardly
    occurs has a short vector.
    """

    def __init__(self, width: int, components: int):
        super().__init__()
        self.shares = nn.Linear(width, components)

    def forward(self, descriptors: Tensor) -> Tensor:
        """Descriptors [n, N, width] -> representations [n, components, width]."""
        shares = torch.softmax(self.shares(descriptors), -1)
        return shares.transpose(1, 2) @ descriptors / descriptors.shape[1]


class CUNetHead(Head):
    """1 x 1 convolution and unmixing of the deepest maps."""

    def __init__(
        self, channels: int, width: int, components: int, length: float, *, batch_norm: bool
    ):
        super().__init__()
        self.reduce = Pointwise(channels, width, batch_norm=batch_norm)
        self.unmixing = Unmixing(width, components)
        self._length = length

    def forward(self, stages: Stages) -> Tensor:
        """Stages -> features [n, components * width],
        the representations scaled together to one length.
        """
        descriptors = to_descriptors(cast(Tensor, self.reduce(stages[-1])))
        return scale_to_length(self.unmixing(descriptors).flatten(1), self._length)
