"""Fusion of a personal model's encoders: from each encoder's features to those that the
classifier takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trainer.models.named_tensors import add_prefix, select, strip_prefix, without_frozen

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    L = TypeVar("L", np.ndarray, Tensor)

OWN = "encoder"
RECEIVED = "received"
ALONE = "alone"
"""Prefixes of a personal model's encoders. Only the own one has a stem, which the others share."""
LENGTH = "norm.scale"
"""The scalar tensor of a model whose features are normalised:
the length to which they are brought.
"""
NOVELTY = "novelty"
"""Prefix of what only tells images that are like no class:
`ClassAxes` of `edge.bundle.reference`.
"""
_TINY = 1e-12  # least length by which features are divided: those of nothing stay zero


class Fusion(NamedTuple):
    """One way to fuse features: a sum with a learned weight or,
    where two encoders have no weight, a concatenation.

    Before, each encoder's features may be normalised, but those of ALONE, which has been trained
    without.
    """

    name: str
    encoders: tuple[str, ...]  # prefixes, in the order of a bundle's opinions and maps
    weight: str = ""  # name of the scalar tensor that weighs the first encoder against the second
    length: str = ""  # LENGTH where features are normalised

    @property
    def concatenates(self) -> bool:
        """Whether the classifier takes the features of all encoders side by side."""
        return len(self.encoders) > 1 and not self.weight

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalar tensors beside encoders and classifier."""
        return tuple(filter(None, (self.weight, self.length)))

    def width(self, features: int) -> int:
        """Width of the fused features, from that of one encoder's."""
        return features * len(self.encoders) if self.concatenates else features

    def fuse(self, features: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
        """Each encoder's features [n, features] fused;
        `tensors` hold the weight and the length, where there is one.
        """
        features = self.normalise(features, tensors)
        if self.weight:
            first, second = self.scale(features, tensors)
            return first + second
        if self.concatenates:
            import torch  # noqa: PLC0415  (the coordinator has none)

            return torch.cat(features, 1)
        return features[0]

    def normalise(self, features: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Each encoder's features [n, features], as the part of the classifier takes them that
        reads them.
        """
        factors = self._factors(features, tensors)
        weighted: list[Tensor] = []
        for each, factor in zip(features, factors, strict=True):
            part = each if factor is None else each * factor
            weighted.append(part)
        return weighted

    def heads(
        self, weight: Tensor, features: Sequence[Tensor], tensors: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """What of the classifier's weight reads each encoder's features [n,
        features] as they come from it.

        Their products, added up, plus the bias are the logits. [classes, features]; of normalised
        features [n, classes, features], since what an image's are multiplied by depends on them.
        """
        heads = self.scale(self.split_head(weight, features[0].shape[1]), tensors)
        factors = self._factors(features, tensors)
        weighted: list[Tensor] = []
        for head, factor in zip(heads, factors, strict=True):
            part = head if factor is None else head * factor.unsqueeze(1)
            weighted.append(part)
        return weighted

    def _factors(
        self, features: Sequence[Tensor], tensors: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """What multiplies each encoder's features, positive [n, 1] (or [n, features]);
        None for what stays as it is.
        """
        if not self.length:
            return [None] * len(features)
        factors: list[Tensor | None] = []
        for prefix, each in zip(self.encoders, features, strict=True):
            factor = (
                None
                if prefix == ALONE
                else tensors[self.length] / each.norm(dim=1, keepdim=True).clamp(min=_TINY)
            )
            factors.append(factor)
        return factors

    def scale(self, parts: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """What belongs to each encoder, times the encoder's share."""
        if not self.weight:
            return list(parts)
        weight = tensors[self.weight]
        return [weight * parts[0], (1 - weight) * parts[1]]

    def split_head(self, head: Tensor, features: int) -> list[Tensor]:
        """The parts of a classifier's weight that read each encoder's features,
        of which there are so many.
        """
        if self.concatenates:
            return [head[:, n * features : (n + 1) * features] for n in range(len(self.encoders))]
        return [head] * len(self.encoders)


SINGLE = Fusion("single encoder", (OWN,))
NORMALISED = SINGLE._replace(length=LENGTH)
WEIGHTED_SUM = Fusion("weighted sum", (RECEIVED, OWN), weight="fusion")
CONCATENATION = Fusion("concatenation", (RECEIVED, OWN))


def infer_fusion(personal: Mapping[str, Any]) -> Fusion:
    """The fusion of a personal model, from its tensors' names: nothing else of it travels."""
    encoders_list = []
    for prefix in (RECEIVED, OWN, ALONE):
        if any(name.startswith(f"{prefix}.") for name in personal):
            encoders_list.append(prefix)
    encoders = tuple(encoders_list)
    if WEIGHTED_SUM.weight in personal:
        found = WEIGHTED_SUM
    else:
        found = CONCATENATION._replace(encoders=encoders) if len(encoders) > 1 else SINGLE
    return found._replace(length=LENGTH) if LENGTH in personal else found


def mix(
    together: Mapping[str, Tensor], alone: Mapping[str, Tensor], own: Sequence[int], scale: float
) -> dict[str, Tensor]:
    """One model of two: its logits are those of `mix_logits`,
    since a mean of linear classifiers is one.

    Args:
        together: a personal model that was trained with others. Normalised features stay so;
            `alone`'s never are.
        alone: the plain model that the same node has trained without them.
        own: labels of the node's classes.
        scale: that of `spread_ratio`.
    """
    import torch  # noqa: PLC0415  (the coordinator has none)

    fusion = infer_fusion(together)
    alone_weight = alone["classifier.weight"]
    features = alone_weight.shape[1]
    weight = together["classifier.weight"]
    bias = together["classifier.bias"]
    heads = fusion.scale(fusion.split_head(weight, features), together)
    mixed = [mix_logits(head.T, torch.zeros_like(head.T), own, scale).T for head in heads]
    mixed.append(mix_logits(torch.zeros_like(alone_weight.T), alone_weight.T, own, scale).T)
    return {
        **select(together, (OWN, RECEIVED, LENGTH, NOVELTY)),
        **add_prefix(ALONE, without_frozen(strip_prefix(OWN, alone))),
        "classifier.weight": torch.cat(mixed, 1),
        "classifier.bias": mix_logits(bias, alone["classifier.bias"], own, scale),
    }


def mix_logits(together: L, alone: L, own: Sequence[int], scale: float) -> L:
    """Mean of two models' logits [..., classes] among a node's own classes;
    of other classes `together` alone knows.

    `alone`'s logits are multiplied by `scale` first. Own ones keep `together`'s level against other
    classes.
    """
    mixed = together * 1
    level = together[..., own].mean(-1)[..., None]
    mixed[..., own] = level + (together[..., own] - level + scale * _centre(alone, own)) / 2
    return mixed


def spread_ratio(together: np.ndarray, alone: np.ndarray, own: Sequence[int]) -> float:
    """What brings `alone`'s logits [n, classes] among own classes to the spread of `together`'s.

    A model that has seen a few images only is too sure of itself, and would drown the other in a
    plain mean.
    """
    spread = float(_centre(alone, own).std())
    return float(_centre(together, own).std()) / spread if spread > 0 else 1.0


def _centre(logits: L, own: Sequence[int]) -> L:
    among: L = logits[..., own]
    centred: L = among - among.mean(-1)[..., None]
    return centred
