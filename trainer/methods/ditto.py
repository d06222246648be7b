"""Ditto (Li et al., 2021, Algorithm 1): beside FedAvg's model each node trains one of its own,
drawn towards it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

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
    Step,
)
from trainer.methods.fedavg import fedavg
from trainer.models.named_tensors import add_prefix, strip_prefix

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tensors


L_P = Metric("L_P", "loss of the personal model", "Stage 2, on the node's training images.")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `ditto`."""

    # lambda, the pull towards the received model; 0 would be training alone.
    lam: Annotated[float, msgspec.Meta(gt=0)] = msgspec.field(default=0.1, name="lambda")
    personal_epochs: Annotated[int, msgspec.Meta(ge=0)] = 0  # a round; 0 = the spec's local_epochs


def ditto(training: Training, options: Options) -> Method:
    """Stage 1 is FedAvg's; stage 2 trains the personal model: v <- v - rate *
    (grad F(v) + lambda * (v - w_G)).
    """

    def personal(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits = network.linear(
            tensors, "personal.classifier", encode(tensors, batch.images, "personal.encoder")
        )
        loss = network.cross_entropy(logits, batch.labels)
        own = network.flat(strip_prefix("personal", tensors), WHOLE)
        received = network.flat(batch.received, WHOLE)
        return loss + options.lam / 2 * (own - received).square().sum(), {L_P.key: loss}

    step = Step(("personal",), personal)
    return fedavg(training, OneStage())._replace(
        init_node=lambda broadcast, shape, random: add_prefix("personal", broadcast),
        refine=(Phase("personal", (step,), options.personal_epochs or training.local_epochs),),
        deploy=lambda own, received: strip_prefix("personal", own),
        deploys_final=False,
        metrics=(CLASSIFICATION_LOSS, L_P),
    )


ENTRY = Entry(Options, ditto)
