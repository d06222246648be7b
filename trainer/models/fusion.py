"""Fusion of a personal model's encoders: from each encoder's features to those that the classifier takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

OWN, RECEIVED = "encoder", "received"
"""Prefixes of a personal model's encoders. The received one has no stem of its own: it shares the other's."""


class Fusion(NamedTuple):
    """One way to fuse features: a sum with a learned weight or, where two encoders have no weight, a concatenation."""

    name: str
    encoders: tuple[str, ...]  # prefixes, in the order of a bundle's opinions and maps
    weight: str = ""  # name of the scalar tensor that weighs the first encoder against the second

    @property
    def concatenates(self) -> bool:
        """Whether the classifier takes the features of all encoders side by side."""
        return len(self.encoders) > 1 and not self.weight

    def width(self, features: int) -> int:
        """Width of the fused features, from that of one encoder's."""
        return features * len(self.encoders) if self.concatenates else features

    def fuse(self, features: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
        """Each encoder's features [n, features] fused; `tensors` hold the weight, where there is one."""
        if self.weight:
            first, second = self.scale(features, tensors)
            return first + second
        if self.concatenates:
            import torch  # noqa: PLC0415  (the coordinator has none)

            return torch.cat(list(features), 1)
        return features[0]

    def scale(self, parts: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """What belongs to each encoder, times the encoder's share."""
        if not self.weight:
            return list(parts)
        weight = tensors[self.weight]
        return [weight * parts[0], (1 - weight) * parts[1]]

    def split_head(self, head: Tensor, features: int) -> list[Tensor]:
        """The parts of a classifier's weight that read each encoder's features, of which there are so many."""
        if self.concatenates:
            return [head[:, :features], head[:, features:]]
        return [head] * len(self.encoders)


SINGLE = Fusion("single encoder", (OWN,))
WEIGHTED_SUM = Fusion("weighted sum", (RECEIVED, OWN), weight="fusion")
CONCATENATION = Fusion("concatenation", (RECEIVED, OWN))


def infer_fusion(personal: Mapping[str, Any]) -> Fusion:
    """The fusion of a personal model, from its tensors' names: nothing else of it travels."""
    if not any(name.startswith(f"{RECEIVED}.") for name in personal):
        return SINGLE
    return WEIGHTED_SUM if WEIGHTED_SUM.weight in personal else CONCATENATION
