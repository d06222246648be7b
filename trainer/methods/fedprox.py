"""FedProx (Li et al., 2020, eq.

2): FedAvg whose local models are drawn towards the received one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    WHOLE,
    Batch,
    Encode,
    Entry,
    Method,
    OneStage,
    classification_loss,
    plain_phase,
)
from trainer.methods.fedavg import fedavg

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tensors


class Options(OneStage, frozen=True):
    """Options of `fedprox`."""

    # weight of the proximal term; 0 would be fedavg
    mu: Annotated[float, msgspec.Meta(gt=0)] = 0.01


def fedprox(training: Training, options: Options) -> Method:
    """FedAvg with mu / 2 * ||w - w_G||^2 added to every node's loss."""

    def proximal(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = classification_loss(network, tensors, batch, encode)
        distance = (
            (network.flat(tensors, WHOLE) - network.flat(batch.received, WHOLE)).square().sum()
        )
        return loss + options.mu / 2 * distance, metrics

    return fedavg(training, options)._replace(
        train=(plain_phase(training, options.epochs, proximal),)
    )


ENTRY = Entry(Options, fedprox)
