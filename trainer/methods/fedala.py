"""FedALA (Zhang et al., 2023, Algorithm 1): before training,
each node learns how much of the received head to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    CLASSIFICATION_LOSS,
    WHOLE,
    Batch,
    Encode,
    Entry,
    Method,
    Metric,
    OneStage,
    Phase,
    Sgd,
    Step,
    init_shared_classifier,
    plain_phase,
    send_prefixes,
)
from trainer.models.named_tensors import select

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tensors

L_W = Metric(
    "L_W",
    "mixing loss",
    "While the node learns how to mix its classifier with the received one.",
)
_WINDOW = 10  # losses that must have come to rest in the first adaptation


class Options(OneStage, frozen=True):
    """Options of `fedala`."""

    eta: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # step of the mixing weights
    # of the node's images, on which they are learnt
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    # standard deviation of the last losses that counts as rest
    rest: Annotated[float, msgspec.Meta(gt=0)] = 0.01
    # of the first adaptation, should they never come to rest
    most_epochs: Annotated[int, msgspec.Meta(ge=1)] = 50


def fedala(training: Training, options: Options) -> Method:
    """FedAvg, but a node's classifier starts at theta + (Theta - theta) * W: its own,
    mixed with the received one.

    W lies in [0, 1], starts at 1 and is kept. The encoder (the paper's lower layers) is taken as
    received.
    """
    return Method(
        train=(_adaptation(options), plain_phase(training, options.epochs)),
        sends=send_prefixes(*WHOLE),
        init_server=init_shared_classifier,
        init_node=lambda broadcast, shape, random: {
            **{
                f"mix.{name}": np.ones_like(value)
                for name, value in select(broadcast, ("classifier",)).items()
            },
            "adapted": np.zeros((), np.float32),
        },
        receive=lambda own, received: {**own, **select(received, ("encoder",))},
        metrics=(CLASSIFICATION_LOSS, L_W),
    )


def _mixed(tensors: Tensors, received: Tensors) -> Tensors:
    own = select(tensors, ("classifier",))
    return {
        name: value + (received[name] - value) * tensors[f"mix.{name}"]
        for name, value in own.items()
    }


def _differs(tensors: Tensors, received: Tensors) -> bool:
    """Whether there is anything to learn: in the first round a node's classifier is the received
    one.
    """
    return any(
        bool((value != received[name]).any())
        for name, value in select(tensors, ("classifier",)).items()
    )


def _adaptation(options: Options) -> Phase:
    def mixing(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits = network.linear(
            _mixed(tensors, batch.received), "classifier", encode(tensors, batch.images)
        )
        loss = network.cross_entropy(logits, batch.labels)
        return loss, {L_W.key: loss}

    def is_settled(tensors: Tensors, received: Tensors, losses: Sequence[float]) -> bool:
        at_rest = len(losses) >= _WINDOW and float(np.std(losses[-_WINDOW:])) < options.rest
        return bool(tensors["adapted"]) or at_rest or not _differs(tensors, received)

    def after(tensors: Tensors, received: Tensors, steps: int) -> Tensors:
        adapted = (
            tensors["adapted"]
            if not _differs(tensors, received)
            else tensors["adapted"].new_ones(())
        )
        return {**tensors, **_mixed(tensors, received), "adapted": adapted}

    return Phase(
        "adapt",
        (Step(("mix",), mixing),),
        options.most_epochs,
        bounds={"mix": (0.0, 1.0)},
        sgd=Sgd(options.eta),
        share=options.share,
        is_settled=is_settled,
        after=after,
    )


ENTRY = Entry(Options, fedala)
