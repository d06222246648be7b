"""EfficientNet-Lite0, with Google's ImageNet weights.

`efficientnet_lite0_mid` is the default of a federation: its features are those of the middle of the
network beside those of its end. Of the files of weights research/pretraining/convert_lite0.py made
the first, middle_directions.py the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import Encoder, Shipped

if TYPE_CHECKING:
    from trainer.models.encoders.encoder_module import EncoderModule

_WEIGHTS = "imagenet_efficientnet_lite0.safetensors"
_DIRECTIONS = "imagenet_efficientnet_lite0_directions.safetensors"
_COUNT = 128  # directions of the end's features


def _build() -> EncoderModule:
    from trainer.models.encoders import efficientnet_lite  # noqa: PLC0415  (imports torch)

    return efficientnet_lite.efficientnet_lite0()


def _build_middle() -> EncoderModule:
    from trainer.models.encoders import efficientnet_lite  # noqa: PLC0415  (imports torch)

    return efficientnet_lite.efficientnet_lite0(_COUNT)


EFFICIENTNET_LITE0 = Encoder(
    features=1280,
    values=3_413_024,
    build=_build,
    shipped=Shipped("imagenet", (_WEIGHTS,)),
)
EFFICIENTNET_LITE0_MID = Encoder(
    features=192 + _COUNT,
    values=3_413_024 + 1280 * _COUNT,
    build=_build_middle,
    shipped=Shipped("imagenet", (_WEIGHTS, _DIRECTIONS)),
    size=224,
)
