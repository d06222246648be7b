"""Attacks on patches besides reconstruction: class, plant, linkage to one image, membership of a known image.

As in `inversion`, the attacker knows the model and how patches are cut and protected.
"""

from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.audit.fitted_network import perceptron
from trainer.audit.patch_inversion import Items, Plant, Whole, cut
from trainer.privacy.patch_protection import RANGE, ChannelStatistics, Floats, Protection, draw_mixtures
from trainer.training.seeding import generator, key_to_seed

_LEAST = 0.05  # deviations: how near counts as the same patch where nothing protects it
_EPOCHS, _BATCH = 20, 64


def likeness(sent: Floats, cells: Floats, measure: ChannelStatistics, protection: Protection) -> Floats:
    """How well each image [n, C, P, m, m] explains each patch [b, C, m, m]: log likelihood a channel, [b, n].

    The place is unknown: the mean over all. In a mixture the other images are as the measure says. Levels are those of
    the measure: the sender's, which the values that occur in its patches give away.
    """
    seen, known = _scaled(sent, measure).flatten(2), _scaled(cells.swapaxes(1, 2), measure).flatten(3)
    total = torch.zeros(len(seen), len(cells))
    for channel in range(seen.shape[1]):
        own = known[:, :, channel] / protection.mix
        explained = _explained(seen[:, channel], own.flatten(0, 1), protection)
        total += torch.logsumexp(explained.view(len(seen), *own.shape[:2]), 2)
    return np.asarray((total / seen.shape[1]).numpy())


def _explained(seen: Tensor, known: Tensor, protection: Protection) -> Tensor:
    """Log likelihood of what is seen [b, k] if it was made of what is known [N, k], [b, N]; all in deviations."""
    mix, levels = protection.mix, protection.levels
    spread = sqrt(protection.noise**2 + (mix - 1) / mix**2 + _LEAST**2)
    if not levels:
        return -torch.cdist(seen, known).square() / (2 * spread**2)
    step = 2 * RANGE / (levels - 1)
    below = torch.special.ndtr((-RANGE + step * (torch.arange(1, levels) - 0.5) - known[..., None]) / spread)
    chances = torch.diff(functional.pad(functional.pad(below, (1, 0)), (0, 1), value=1.0))  # [N, k, levels]
    level = ((seen + RANGE) / step).round().long().clamp(0, levels - 1)
    return functional.one_hot(level, levels).flatten(1).float() @ chances.clamp_min(1e-9).log().flatten(1).T


def found(sent: Items, suspects: Plant, own: Plant, measure: ChannelStatistics, protection: Protection) -> Floats:
    """How surely each suspect is behind one of the items, [n]: by how much it explains one better than all others do.

    The others are the other suspects, and images of the attacker's own.
    """
    scores = likeness(sent.patches, suspects.join(own).cells, measure, protection)
    second, first = np.sort(scores, 1)[:, -2:, None].swapaxes(0, 1)
    return np.asarray((scores - np.where(scores == first, second, first)).max(0)[: len(suspects.labels)])


def classified(known: Floats, labels: Whole, asked: Floats, measure: ChannelStatistics, seed: int) -> Whole:
    """What a small network that was trained on known patches says of others [n, C, m, m]."""
    network = _trained(_scaled(known, measure), torch.from_numpy(labels), seed)
    return np.asarray(network(_scaled(asked, measure)).argmax(1).numpy())


def linked(attacker: Plant, victim: Plant, protection: Protection, pairs: int, seed: int) -> tuple[Floats, Whole]:
    """Pairs of the victim's items of one class: (how surely they are of one image, whether they are), [2 * pairs].

    Learnt from pairs of the attacker's own.
    """
    known, asked = (
        _pairs(plant, protection, count, generator(seed, "pairs", name))
        for plant, count, name in ((attacker, 4 * pairs, "known"), (victim, pairs, "asked"))
    )
    logits = _trained(known[0], known[1], seed)(asked[0])
    return np.asarray((logits[:, 1] - logits[:, 0]).numpy()), asked[1].numpy()


def _pairs(plant: Plant, protection: Protection, count: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """How pairs of items differ [2 * count, 2C], and whether they are of the same images: first those that are."""
    images = draw_mixtures(plant.labels, count, 2 * protection.mix, random)
    first, other = images[:, : protection.mix], images[:, protection.mix :]
    one, same, another = (_summary(cut(plant, each, protection, random), plant) for each in (first, first, other))
    differences = torch.cat([one - same, one - another]).abs()
    return differences, torch.arange(2).flip(0).repeat_interleave(len(images))


def _summary(sent: Items, plant: Plant) -> Tensor:
    """Mean and deviation of each channel, [n, 2C]."""
    scaled = _scaled(sent.patches, plant.measure).flatten(2)
    return torch.cat([scaled.mean(2), scaled.std(2)], 1)


def _scaled(patches: Floats, measure: ChannelStatistics) -> Tensor:
    """In deviations of each channel; channels come third from the end."""
    mean, deviation = (torch.from_numpy(each)[:, None, None] for each in measure)
    return (torch.from_numpy(patches) - mean) / deviation.clamp_min(1e-6)


def _trained(seen: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """A network that gives logits, after some epochs."""
    torch.manual_seed(key_to_seed(seed, "inference"))
    network = perceptron(seen[0].numel(), int(labels.max()) + 1)
    optimiser = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.1)
    for _ in range(_EPOCHS):
        for some in torch.split(torch.randperm(len(seen)), _BATCH):
            optimiser.zero_grad()
            functional.cross_entropy(network(seen[some]), labels[some]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return network.requires_grad_(False)
