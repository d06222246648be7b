"""What a method is: a value that says what is trained against which loss, and what leaves the node.

The engine owns steps, optimiser, batches and random numbers. A method's file imports no torch: what needs it reaches a
loss as an argument. So the coordinator, which only weighs and averages, runs where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from broker_config.messages import Training
from trainer.tree import Arrays
from trainer.weights import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.network import Network, Tree

Metrics = dict[str, float]


class Batch(NamedTuple):
    """What a loss sees besides the tree."""

    images: Tensor  # float32 [b, 3, S, S], normalised, augmented
    labels: Tensor  # int64 [b]
    reference: (
        Tensor | None
    )  # the received encoder's features [b, features] of the same view; where the phase asks for it
    received: Tree  # the round's broadcast, frozen


Encode = Callable[["Tree", "Tensor"], "Tensor"]
"""The trained encoder as the phase runs it: (tree, images) -> features, with the spec's BatchNorm mode."""

Loss = Callable[["Network", "Tree", Batch, Encode], "tuple[Tensor, dict[str, Tensor]]"]
"""(network, tree, batch, encode) -> (scalar to descend, metrics to report)."""


class Step(NamedTuple):
    """One optimiser step on a batch: the tensors under `trains` descend `loss`. Without any, it is only measured."""

    trains: tuple[str, ...]
    loss: Loss


class Phase(NamedTuple):
    """One stretch of local training: its steps are taken in turn on every batch."""

    name: str  # keys the phase's random numbers
    steps: tuple[Step, ...]
    epochs: int
    uses_reference: bool = False
    rates: Mapping[str, float] = {}  # learning rate of a prefix, where it differs from the spec's
    bounds: Mapping[str, tuple[float, float]] = {}  # a tensor is clamped to this after each step


class Method(NamedTuple):
    """A federated method. State goes in and comes out; nothing is changed behind the caller's back."""

    # What the coordinator adds to the initial encoder (names below `encoder.`) to make the first broadcast.
    init_server: Callable[[Shape, np.random.Generator], Arrays]
    # What a node has of its own from the start.
    init_node: Callable[[Shape, np.random.Generator], Arrays]
    # Before training: (own tree, received tree) -> the tree that is trained.
    receive: Callable[[Tree, Tree], Tree]
    train: tuple[Phase, ...]  # stage 1
    sends: tuple[str, ...]  # prefixes of what leaves the node after stage 1
    # What the node measures as its weight: (metrics of stage 1, training images) -> raw weight.
    measure: Callable[[Metrics, int], float]
    # The coordinator's reading of it: raw weight -> weight in (0, weight_cap]; ValueError if it cannot be honest.
    weigh: Callable[[float], float]
    weight_cap: float
    refine: tuple[Phase, ...]  # stage 2, while the upload is under way; changes nothing of what was sent
    # The personal model: (own tree, broadcast) -> `encoder`, `classifier` and, when fused, `received` and `fusion`.
    deploy: Callable[[Tree, Tree], Tree]
    # Whether `deploy` takes the broadcast that the last round started from, or the one made after it.
    deploys_final: bool


Factory = Callable[..., Method]


def images_weight(raw: float) -> float:
    """FedAvg's weight, the number of training images. More than IMAGES_CAP count as IMAGES_CAP.

    Raises:
        ValueError: not a positive whole number.
    """
    if raw < 1 or raw != int(raw):
        raise ValueError(f"a number of training images cannot be {raw!r}")
    return min(raw, IMAGES_CAP)


IMAGES_CAP = 4096.0


def classification(network: Network, tree: Tree, batch: Batch, encode: Encode) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the plain model, classifier on encoder."""
    loss = network.cross_entropy(network.linear(tree, "classifier", encode(tree, batch.images)), batch.labels)
    return loss, {"L_C": loss}


def plain_phase(training: Training, epochs: int | None = None) -> Phase:
    """Ordinary supervised training of encoder and classifier."""
    return Phase("train", (Step(("encoder", "classifier"), classification),), epochs or training.local_epochs)
