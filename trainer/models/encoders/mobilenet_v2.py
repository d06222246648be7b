"""MobileNetV2 (Sandler et al., 2018), torchvision's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import PRETRAINED, Encoder, Shipped

if TYPE_CHECKING:
    from torch import nn


def _build() -> nn.Module:
    from trainer.models.encoders.pooled_features import PooledFeatures  # noqa: PLC0415  (imports torch)
    from trainer.models.torchvision_import import torchvision_models  # noqa: PLC0415  (likewise)

    return PooledFeatures(torchvision_models().mobilenet_v2().features)


MOBILENET_V2 = Encoder(
    features=1280,
    values=2_257_984,
    build=_build,
    imagenet="MobileNet_V2_Weights",
    shipped=Shipped("surface", PRETRAINED / "surface_mobilenet_v2.safetensors"),
)
