"""ResNets (He et al., 2016), torchvision's, whole or up to their third of four stages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import Encoder

if TYPE_CHECKING:
    from trainer.models.encoders.encoder_module import EncoderModule


def _build(name: str, tap: str) -> EncoderModule:
    # Both import torch, which takes seconds.
    from trainer.models.encoders.staged_encoder import StagedEncoder  # noqa: PLC0415
    from trainer.models.torchvision_import import torchvision_models  # noqa: PLC0415

    return StagedEncoder.of(getattr(torchvision_models(), name)(), tap)


RESNET18 = Encoder(
    features=512,
    values=11_186_112,
    build=partial(_build, "resnet18", "layer4"),
    imagenet="ResNet18_Weights",
)
RESNET18_MID = Encoder(
    features=256,
    values=2_787_264,
    build=partial(_build, "resnet18", "layer3"),
    imagenet="ResNet18_Weights",
    lacks=("layer4.",),
)
RESNET50 = Encoder(
    features=2048,
    values=23_561_152,
    build=partial(_build, "resnet50", "layer4"),
    imagenet="ResNet50_Weights",
)
RESNET50_MID = Encoder(
    features=1024,
    values=8_573_888,
    build=partial(_build, "resnet50", "layer3"),
    imagenet="ResNet50_Weights",
    lacks=("layer4.",),
)
