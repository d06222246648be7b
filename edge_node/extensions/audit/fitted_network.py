"""Networks that an attacker trains on its own images, to guess from what it sees of others."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_node.extensions.audit.measures import Floats

Draw = Callable[[], tuple[Tensor, Tensor]]
HIDDEN = 512


def perceptron(inputs: int, *outputs: int) -> nn.Module:
    """What is seen [n, ...], `inputs` numbers each, -> [n, *outputs]."""
    layers = (nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
    return nn.Sequential(
        nn.Flatten(), *layers, nn.Linear(HIDDEN, prod(outputs)), nn.Unflatten(1, outputs)
    )


class Fitted(NamedTuple):
    """A network that guesses images in deviations from their mean."""

    network: nn.Module
    mean: float
    deviation: float

    def guess(self, seen: Tensor) -> Floats:
        """What is seen [n, ...] -> images [n, 3, s, s], 0 to 1."""
        with torch.no_grad():
            made: Tensor = self.mean + self.deviation * self.network(seen)
        return cast(Floats, made.clamp(0, 1).numpy())


def fitted(
    network: nn.Module, draw: Draw, epochs: int, random: np.random.Generator, batch: int
) -> Fitted:
    """Train by least squares (Adam, a rate that falls to 0);
    what is seen and guessed is drawn anew every epoch.
    """
    optimiser = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    _, first = draw()
    mean = float(first.mean())
    deviation = float(first.std())
    for _ in range(epochs):
        seen, target = draw()
        for some in torch.split(torch.from_numpy(random.permutation(len(seen))), batch):
            optimiser.zero_grad()
            wanted = (target[some] - mean) / deviation
            loss = functional.mse_loss(network(seen[some]), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        schedule.step()
    return Fitted(network, mean, deviation)
