"""CLASSNet: statistical self-similarity of feature maps, by position and layer (Chen, Li,
Quan, Xu, Ji, CVPR 2021).

The maps of several layers, brought to the same number of channels and the same size, form one
volume per channel. The local fractal dimension of that volume is estimated by differential box
counting; the features are histograms of it.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_node.extensions.textures.networks.trunk import GlobalAveragePooling, Head, Stages

SIDES = (3, 5, 7)
"""Sides of the windows, in positions and (as far as there are layers) in layers;
each is two more than the last.
"""

LEVELS = 16.0
"""Height of a box of side 1, as a number of boxes to a difference of 1."""

_DOMAIN = 3  # dimensions of a volume's domain: rows, columns, layers


def local_dimension(volumes: Tensor) -> Tensor:
    """The local differential box-counting dimension of volumes [n, channels, layers, h, w],
    in the same shape.

    Within a window of side r, the values take (max - min) * LEVELS / r + 1 boxes; if that count
    grows as r^-b, the dimension is 3 + b: 3 for a smooth volume, 4 for one that is equally rough at
    all scales. b is the slope of a least-squares line through the windows' counts, both axes
    logarithmic.
    """
    sides = [-log(side) for side in SIDES]
    centre = sum(sides) / len(sides)
    spread = sum((side - centre) ** 2 for side in sides)
    slope = torch.zeros_like(volumes)
    largest = volumes
    smallest = -volumes
    # each window is the union of its neighbours' previous ones
    for side, position in zip(SIDES, sides, strict=True):
        largest = functional.max_pool3d(largest, 3, 1, 1)
        smallest = functional.max_pool3d(smallest, 3, 1, 1)
        slope = slope + (position - centre) / spread * torch.log(
            (largest + smallest) * (LEVELS / side) + 1
        )
    return _DOMAIN + slope


class SoftHistogram(nn.Module):
    """Soft histogram of each channel's values, over bins with learned centres and widths.

    A value counts in bin q by softmax_q(-((value - centre_q) / width_q)^2); outputs are relative to
    a flat histogram.
    """

    def __init__(self, channels: int, bins: int, lowest: float, highest: float):
        super().__init__()
        self.centres = nn.Parameter(torch.linspace(lowest, highest, bins).repeat(channels, 1))
        self.sharpness = nn.Parameter(torch.full((channels, bins), (bins - 1) / (highest - lowest)))

    def forward(self, values: Tensor) -> Tensor:
        """[n, channels, N] -> [n, channels, bins], each at least -1; their mean over bins is 0."""
        distances = (values.unsqueeze(-1) - self.centres.unsqueeze(1)) * self.sharpness.unsqueeze(1)
        return torch.softmax(-distances.square(), -1).mean(2) * self.centres.shape[1] - 1


class ClassHead(Head):
    """Cross-layer aggregation of statistical self-similarity,
    concatenated to global average pooling.
    """

    def __init__(self, channels: Sequence[int], width: int, bins: int, size_of: int):
        """Layers with `channels` are mapped to `width` channels,
        and resized to the size of layer number `size_of`.
        """
        super().__init__()
        self.align = nn.ModuleList(nn.Conv2d(inputs, width, 1, bias=False) for inputs in channels)
        self.norm = nn.GroupNorm(width, width)
        self.histogram = SoftHistogram(width, bins, _DOMAIN, _DOMAIN + 1)
        self.pooled = GlobalAveragePooling()
        self._size_of = size_of

    def forward(self, stages: Stages) -> Tensor:
        """Stages -> features [n, channels of the deepest + width * bins]."""
        size = stages[self._size_of].shape[2:]
        aligned = [
            self.norm(functional.interpolate(conv(maps), size, mode="bilinear"))
            for conv, maps in zip(self.align, stages, strict=True)
        ]
        dimensions = local_dimension(torch.stack(aligned, 2))
        return torch.cat([self.pooled(stages), self.histogram(dimensions.flatten(2)).flatten(1)], 1)
