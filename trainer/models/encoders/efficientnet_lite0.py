"""EfficientNet-Lite0, with Google's ImageNet weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import PRETRAINED, Encoder, Shipped

if TYPE_CHECKING:
    from torch import nn


def _build() -> nn.Module:
    from trainer.models.encoders import efficientnet_lite  # noqa: PLC0415  (imports torch)

    return efficientnet_lite.efficientnet_lite0()


EFFICIENTNET_LITE0 = Encoder(
    features=1280,
    values=3_413_024,
    build=_build,
    shipped=Shipped("imagenet", PRETRAINED / "imagenet_efficientnet_lite0.safetensors"),
)
