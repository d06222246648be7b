"""MobileNetV2, whole or up to its middle, with weights for surfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import Encoder, Shipped

if TYPE_CHECKING:
    from trainer.models.encoders.encoder_module import EncoderModule

_SURFACE = Shipped("surface", ("surface_mobilenet_v2.safetensors",))
_STAGES = 5  # of the variant that ends in the middle


def _build() -> EncoderModule:
    from trainer.models.encoders import inverted_residuals  # noqa: PLC0415  (imports torch)

    return inverted_residuals.mobilenet_v2()


def _build_middle() -> EncoderModule:
    from trainer.models.encoders import inverted_residuals  # noqa: PLC0415  (imports torch)

    return inverted_residuals.mobilenet_v2(_STAGES)


MOBILENET_V2 = Encoder(
    features=1280,
    values=2_257_984,
    build=_build,
    imagenet="MobileNet_V2_Weights",
    shipped=_SURFACE,
)
MOBILENET_V2_MID = Encoder(
    features=96,
    values=558_656,
    build=_build_middle,
    imagenet="MobileNet_V2_Weights",
    shipped=_SURFACE,
    lacks=tuple(f"features.{number}." for number in range(14, 19)),
)
