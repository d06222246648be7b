"""FedALA (Zhang et al., 2023, Algorithm 1): before training, each node learns how much of the received head to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    WHOLE,
    Batch,
    Encode,
    Method,
    OneStage,
    Phase,
    Sgd,
    Step,
    plain_phase,
    share,
    shared_classifier,
)
from trainer.models.named_tensors import pick

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tree

_WINDOW = 10  # losses that must have come to rest in the first adaptation


class Options(OneStage, frozen=True):
    """Options of `fedala`."""

    eta: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # step of the mixing weights
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8  # of the node's images, on which they are learnt
    rest: Annotated[float, msgspec.Meta(gt=0)] = 0.01  # standard deviation of the last losses that counts as rest
    most_epochs: Annotated[int, msgspec.Meta(ge=1)] = 50  # of the first adaptation, should they never come to rest


def fedala(training: Training, options: Options) -> Method:
    """FedAvg, but a node's classifier starts at theta + (Theta - theta) * W: its own, mixed with the received one.

    W lies in [0, 1], starts at 1 and is kept. The encoder (the paper's lower layers) is taken as received.
    """
    return Method(
        train=(_adaptation(options), plain_phase(training, options.epochs)),
        sends=share(*WHOLE),
        init_server=shared_classifier,
        init_node=lambda broadcast, shape, random: {
            **{f"mix.{name}": np.ones_like(value) for name, value in pick(broadcast, ("classifier",)).items()},
            "adapted": np.zeros((), np.float32),
        },
        receive=lambda own, received: {**own, **pick(received, ("encoder",))},
    )


def _mixed(tree: Tree, received: Tree) -> Tree:
    own = pick(tree, ("classifier",))
    return {name: value + (received[name] - value) * tree[f"mix.{name}"] for name, value in own.items()}


def _differs(tree: Tree, received: Tree) -> bool:
    """Whether there is anything to learn: in the first round a node's classifier is the received one."""
    return any(bool((value != received[name]).any()) for name, value in pick(tree, ("classifier",)).items())


def _adaptation(options: Options) -> Phase:
    def mixing(network: Network, tree: Tree, batch: Batch, encode: Encode) -> tuple[Tensor, dict[str, Tensor]]:
        logits = network.linear(_mixed(tree, batch.received), "classifier", encode(tree, batch.images))
        loss = network.cross_entropy(logits, batch.labels)
        return loss, {"L_W": loss}

    def settled(tree: Tree, received: Tree, losses: Sequence[float]) -> bool:
        at_rest = len(losses) >= _WINDOW and float(np.std(losses[-_WINDOW:])) < options.rest
        return bool(tree["adapted"]) or at_rest or not _differs(tree, received)

    def after(tree: Tree, received: Tree, steps: int) -> Tree:
        adapted = tree["adapted"] if not _differs(tree, received) else tree["adapted"].new_ones(())
        return {**tree, **_mixed(tree, received), "adapted": adapted}

    return Phase(
        "adapt",
        (Step(("mix",), mixing),),
        options.most_epochs,
        bounds={"mix": (0.0, 1.0)},
        sgd=Sgd(options.eta),
        share=options.share,
        settled=settled,
        after=after,
    )
