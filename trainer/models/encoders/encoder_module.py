"""The torch module of an encoder: its features, its stem, and the evidence of each place."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

Evidence = Callable[[Tensor], Tensor]
"""A head's weight -> [n, classes, h, w], whose mean over space is the head times the features.

The weight is [classes, features], or one for each image: [n, classes, features].
"""


class EncoderModule(nn.Module):
    """Images [n, 3, S, S] -> features [n, features].

    A child named `stem` keeps its first values: it is neither trained nor sent, and two encoders of
    one model share it. A module that has one overrides both methods.
    """

    def without_stem(self) -> EncoderModule:
        """Return the module that takes what the stem gives; this one if it has no stem."""
        return self

    def explain(self, inputs: Tensor) -> tuple[Tensor, Evidence | None]:
        """Return the features of images, or of their stem's output, and the evidence of each place.

        The evidence is None where features are not a sum over places: nothing exact can be said
        then, and a bundle of this network shows no heat maps.
        """
        return cast(Tensor, self(inputs)), None


def explain_mean(maps: Tensor) -> tuple[Tensor, Evidence]:
    """Return the means of maps [n, features, h, w], and their class activation maps (Zhou et al.,
    2016).
    """
    return maps.mean((2, 3)), lambda head: (head @ maps.flatten(2)).unflatten(2, maps.shape[2:])
