"""Membership of an image that the attacker has: whether it is behind a patch.

As in `patch_inversion`, the attacker knows the model and how patches are cut and protected.
"""

from math import sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edge_node.extensions.audit.patch_inversion import Items, Plant, scale
from trainer.privacy.patch_protection import RANGE, ChannelStatistics, Floats, Protection

_LEAST = 0.05  # deviations: how near counts as the same patch where nothing protects it


def likeness(
    sent: Floats, cells: Floats, measure: ChannelStatistics, protection: Protection
) -> Floats:
    """How well each image [n, C, P, m, m] explains each patch [b, C, m, m]:
    log likelihood a channel, [b, n].

    The place is unknown: the mean over all. In a mixture the other images are as the measure says.
    Levels are those of the measure: the sender's, which the values that occur in its patches give
    away.
    """
    seen = scale(torch.from_numpy(sent), measure).flatten(2)
    known = scale(torch.from_numpy(cells.swapaxes(1, 2)), measure).flatten(3)
    total = torch.zeros(len(seen), len(cells))
    for channel in range(seen.shape[1]):
        own = known[:, :, channel] / protection.mix
        explained = _explained(seen[:, channel], own.flatten(0, 1), protection)
        total += torch.logsumexp(explained.view(len(seen), *own.shape[:2]), 2)
    return np.asarray((total / seen.shape[1]).numpy())


def _explained(seen: Tensor, known: Tensor, protection: Protection) -> Tensor:
    """Log likelihood of what is seen [b, k] if it was made of what is known [N, k], [b, N];
    all in deviations.
    """
    mix = protection.mix
    levels = protection.levels
    spread = sqrt(protection.noise**2 + (mix - 1) / mix**2 + _LEAST**2)
    if not levels:
        return -torch.cdist(seen, known).square() / (2 * spread**2)
    step = 2 * RANGE / (levels - 1)
    below = torch.special.ndtr(
        (-RANGE + step * (torch.arange(1, levels) - 0.5) - known[..., None]) / spread
    )
    # [N, k, levels]
    chances = torch.diff(functional.pad(functional.pad(below, (1, 0)), (0, 1), value=1.0))
    level = ((seen + RANGE) / step).round().long().clamp(0, levels - 1)
    return (
        functional.one_hot(level, levels).flatten(1).float()
        @ chances.clamp_min(1e-9).log().flatten(1).T
    )


def found(
    sent: Items, suspects: Plant, own: Plant, measure: ChannelStatistics, protection: Protection
) -> Floats:
    """How surely each suspect is behind one of the items, [n]:
    by how much it explains one better than all others do.

    The others are the other suspects, and images of the attacker's own.
    """
    scores = likeness(sent.patches, suspects.join(own).cells, measure, protection)
    second, first = np.sort(scores, 1)[:, -2:, None].swapaxes(0, 1)
    return np.asarray(
        (scores - np.where(scores == first, second, first)).max(0)[: len(suspects.labels)]
    )
