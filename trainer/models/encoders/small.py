"""A network that learns from scratch within seconds, for tests and trials."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from trainer.models.encoders.encoder import Encoder

if TYPE_CHECKING:
    from trainer.models.encoders.encoder_module import EncoderModule

_WIDTHS = (3, 16, 32, 64, 64)


def _build() -> EncoderModule:
    """Four strided convolutions with group normalisation, which takes batches of any size."""
    from torch import nn  # noqa: PLC0415  (takes seconds)

    # Imports torch
    from trainer.models.encoders.staged_encoder import StagedEncoder  # noqa: PLC0415

    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(_WIDTHS):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
        ]
    return StagedEncoder({"features": nn.Sequential(*layers)}, ["features"])


SMALL = Encoder(features=_WIDTHS[-1], values=60_864, build=_build, size=64)
