"""Guesses of what else a patch tells: its class, its plant, linkage to one image.

As in `edge_node.extensions.audit.patch_inference`, the attacker knows the model and how patches
are cut and protected.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from edge_node.extensions.audit.fitted_network import perceptron
from edge_node.extensions.audit.patch_inversion import Items, Plant, Whole, cut, scale
from trainer.privacy.patch_protection import ChannelStatistics, Floats, Protection, draw_mixtures
from trainer.seeding import generator, key_to_seed

_EPOCHS, _BATCH = 20, 64


def classified(
    known: Floats, labels: Whole, asked: Floats, measure: ChannelStatistics, seed: int
) -> Whole:
    """What a small network that was trained on known patches says of others [n, C, m, m]."""
    network = _trained(scale(torch.from_numpy(known), measure), torch.from_numpy(labels), seed)
    return np.asarray(network(scale(torch.from_numpy(asked), measure)).argmax(1).numpy())


def linked(
    attacker: Plant, victim: Plant, protection: Protection, pairs: int, seed: int
) -> tuple[Floats, Whole]:
    """Pairs of the victim's items of one class: (how surely they are of one image,
    whether they are), [2 * pairs].

    Learnt from pairs of the attacker's own.
    """
    known, asked = (
        _pairs(plant, protection, count, generator(seed, "pairs", name))
        for plant, count, name in ((attacker, 4 * pairs, "known"), (victim, pairs, "asked"))
    )
    logits = _trained(known[0], known[1], seed)(asked[0])
    return np.asarray((logits[:, 1] - logits[:, 0]).numpy()), asked[1].numpy()


def _pairs(
    plant: Plant, protection: Protection, count: int, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """How pairs of items differ [2 * count, 2C], and whether they are of the same images:
    first those that are.
    """
    images = draw_mixtures(plant.labels, count, 2 * protection.mix, random)
    first, other = images[:, : protection.mix], images[:, protection.mix :]
    one, same, another = (
        _summary(cut(plant, each, protection, random), plant) for each in (first, first, other)
    )
    differences = torch.cat([one - same, one - another]).abs()
    return differences, torch.arange(2).flip(0).repeat_interleave(len(images))


def _summary(sent: Items, plant: Plant) -> Tensor:
    """Mean and deviation of each channel, [n, 2C]."""
    scaled = scale(torch.from_numpy(sent.patches), plant.measure).flatten(2)
    return torch.cat([scaled.mean(2), scaled.std(2)], 1)


def caught(scores: Floats, positive: NDArray[np.bool_], false: float = 0.01) -> float:
    """Share of the positives above a threshold that a share `false` of the negatives exceeds."""
    return float(
        (scores[positive] > np.quantile(scores[~positive], 1 - false, method="higher")).mean()
    )


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
