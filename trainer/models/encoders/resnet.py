"""ResNets (He et al., 2016), torchvision's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import Encoder

if TYPE_CHECKING:
    from torch import nn


def _build(name: str) -> nn.Module:
    from torch import nn  # noqa: PLC0415  (takes seconds)

    # Imports torch
    from trainer.models.torchvision_import import torchvision_models  # noqa: PLC0415

    network: nn.Module = getattr(torchvision_models(), name)()
    network.fc = nn.Identity()
    return network


RESNET18 = Encoder(
    features=512, values=11_186_112, build=lambda: _build("resnet18"), imagenet="ResNet18_Weights"
)
RESNET50 = Encoder(
    features=2048, values=23_561_152, build=lambda: _build("resnet50"), imagenet="ResNet50_Weights"
)
