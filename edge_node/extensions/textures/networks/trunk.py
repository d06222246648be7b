"""Trunks of the baseline networks: feature maps in stages, from shallow to deep;
what all heads are, and the simplest one.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.models.encoders.encoder_module import Evidence, explain_mean

Stages = Sequence[Tensor]
"""Maps [n, channels, h, w] of several layers, from shallow to deep."""

_GROUPS = 8


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut (He et al.

    2016), with GroupNorm: batches may be of any size.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(_GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(_GROUPS, outputs)
            )

    def forward(self, maps: Tensor) -> Tensor:
        """[n, inputs, h, w] -> [n, outputs, h / stride, w / stride]."""
        inner = functional.relu(self.norm1(self.conv1(maps)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(maps))


class SmallTrunk(nn.Module):
    """One residual block for each stage; the first halves the sides of the maps."""

    def __init__(self, channels: int, widths: Sequence[int]):
        super().__init__()
        inputs = (channels, *widths[:-1])
        self.blocks = nn.ModuleList()
        for index, (before, after) in enumerate(zip(inputs, widths, strict=True)):
            stride = 1 if index else 2
            self.blocks.append(ResidualBlock(before, after, stride))

    def forward(self, maps: Tensor) -> list[Tensor]:
        """[n, channels, h, w] -> the maps themselves, then those of each stage, [n, width,
        h / 2, w / 2].
        """
        stages = [maps]
        for block in self.blocks:
            stages.append(block(stages[-1]))
        return stages


class ResNetTrunk(nn.Module):
    """The convolutions of one of torchvision's residual networks,
    with torchvision's tensor names.
    """

    def __init__(self, network: Any):
        super().__init__()
        self.conv1 = network.conv1
        self.bn1 = network.bn1
        self.relu = network.relu
        self.maxpool = network.maxpool
        self.layer1 = network.layer1
        self.layer2 = network.layer2
        self.layer3 = network.layer3
        self.layer4 = network.layer4

    def forward(self, images: Tensor) -> list[Tensor]:
        """[n, 3, S, S] -> four stages, of S/4, S/8, S/16 and S/32 pixels a side."""
        stages = [self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(images)))))]
        for layer in (self.layer2, self.layer3, self.layer4):
            stages.append(layer(stages[-1]))
        return stages


class DenseTrunk(nn.Module):
    """The convolutions of one of torchvision's densely connected networks,
    with torchvision's tensor names.
    """

    def __init__(self, network: Any):
        super().__init__()
        self.features = network.features

    def forward(self, images: Tensor) -> list[Tensor]:
        """[n, 3, S, S] -> one stage, of S/32 pixels a side."""
        return [functional.relu(self.features(images))]


class Head(nn.Module):
    """The last part of a texture network: what the part before gives -> features [n, features]."""

    def explain(self, inputs: Any) -> tuple[Tensor, Evidence | None]:
        """Return the features and the evidence of each place.

        The evidence is None, as it is here, where features are not a sum over places.
        """
        return cast(Tensor, self(inputs)), None


class GlobalAveragePooling(Head):
    """Global average pooling: the head of a plain residual network."""

    def forward(self, stages: Stages) -> Tensor:
        """Stages -> the mean of the deepest over its positions, [n, channels]."""
        return stages[-1].mean((2, 3))

    def explain(self, inputs: Stages) -> tuple[Tensor, Evidence | None]:
        """Return the features, and class activation maps of the deepest stage."""
        return explain_mean(inputs[-1])


class Pointwise(nn.Module):
    """A 1 x 1 convolution, its normalisation and ReLU: the descriptors that a texture head encodes.

    BatchNorm as in the papers where the trunk has it, GroupNorm where batches may be of any size.
    """

    def __init__(self, inputs: int, outputs: int, *, batch_norm: bool):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs) if batch_norm else nn.GroupNorm(_GROUPS, outputs)
        self.relu = nn.ReLU()

    def forward(self, maps: Tensor) -> Tensor:
        """[n, inputs, h, w] -> [n, outputs, h, w]."""
        return cast(Tensor, self.relu(self.norm(self.conv(maps))))


class TokenHead(Head):
    """A head for maps on a transformer's tokens:
    the grid of tokens stands in for each stage that the head reads.
    """

    def __init__(self, head: nn.Module, side: int, stages: int = 1):
        super().__init__()
        self.head = head
        self._side = side
        self._stages = stages

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n, side * side, d] -> the head's features."""
        maps = tokens.transpose(1, 2).reshape(tokens.shape[0], -1, self._side, self._side)
        return cast(Tensor, self.head([maps] * self._stages))


def to_descriptors(maps: Tensor) -> Tensor:
    """Maps [n, channels, h, w] as a sequence of descriptors, [n, h * w, channels]."""
    return maps.flatten(2).transpose(1, 2)


def scale_to_length(vectors: Tensor, length: float) -> Tensor:
    """Vectors [n, d] scaled to one Euclidean length; a zero vector stays zero,
    with a finite gradient.
    """
    return vectors * (length * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-12))
