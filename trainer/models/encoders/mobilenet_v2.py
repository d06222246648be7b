"""MobileNetV2, with weights for surfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import PRETRAINED, Encoder, Shipped

if TYPE_CHECKING:
    from torch import nn


def _build() -> nn.Module:
    from trainer.models.encoders import inverted_residuals  # noqa: PLC0415  (imports torch)
    from trainer.models.encoders.pooled_features import PooledFeatures  # noqa: PLC0415  (likewise)

    return PooledFeatures(inverted_residuals.mobilenet_v2())


MOBILENET_V2 = Encoder(
    features=1280,
    values=2_257_984,
    build=_build,
    imagenet="MobileNet_V2_Weights",
    shipped=Shipped("surface", PRETRAINED / "surface_mobilenet_v2.safetensors"),
)
