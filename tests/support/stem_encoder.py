"""An encoder whose frozen stem is all that it takes from published weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models import catalogue
from trainer.models.encoders.encoder import Beginning, Encoder
from trainer.models.encoders.encoder_module import EncoderModule, Evidence, explain_mean
from trainer.models.named_tensors import Arrays

NAME = "with_stem"
SIZE = 16
PUBLISHED = ("first.weight", "first.bias")
"""What published weights call the stem's tensors."""
_FEATURES = 8


class StemEncoder(EncoderModule):
    """A stem of one convolution, and another one behind it."""

    def __init__(self, *, stem: bool = True) -> None:
        super().__init__()
        if stem:
            self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.rest = nn.Conv2d(4, _FEATURES, 3, 2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images [n, 3, S, S], or what the stem gives -> features [n, 8]."""
        if "stem" in self._modules:
            inputs = self.stem(inputs)
        return torch.relu(self.rest(inputs)).mean((2, 3))

    def without_stem(self) -> EncoderModule:
        """Return the encoder that takes what the stem gives."""
        return StemEncoder(stem=False)

    def explain(self, inputs: Tensor) -> tuple[Tensor, Evidence | None]:
        """Return the features of what the stem gives, and the evidence of its places."""
        return explain_mean(torch.relu(self.rest(inputs)))


def register_stem_encoder(put: Callable[[Any, str, Any], None]) -> None:
    """Let this process know it as a model; `put` sets a dictionary's item,
    as `monkeypatch.setitem` does.
    """
    encoder = Encoder(
        features=_FEATURES,
        values=4 * (27 + 1) + _FEATURES * (36 + 1),
        build=StemEncoder,
        imagenet="ResNet18_Weights",
        size=SIZE,
        only_size=True,
        beginning=Beginning("stem", "a drawn stem", _rename),
    )
    put(catalogue.KNOWN, NAME, encoder)
    put(catalogue.FEATURES, NAME, encoder.features)
    put(catalogue.VALUES, NAME, encoder.values)
    put(catalogue.DEFAULT_SIZE, NAME, encoder.size)
    put(catalogue.ONLY_SIZE, NAME, encoder.size)


def _rename(arrays: Arrays) -> Arrays:
    return {f"stem.{name[6:]}": arrays[name] for name in PUBLISHED if name in arrays}
