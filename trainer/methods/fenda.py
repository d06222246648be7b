"""FENDA (Kim et al., 2016; federated: Tavakoli et al., 2023):
an exchanged encoder joined with a private one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    CLASSIFICATION_LOSS,
    Batch,
    Encode,
    Entry,
    Method,
    OneStage,
    Phase,
    Step,
    send_prefixes,
)
from trainer.models.fusion import CONCATENATION, RECEIVED
from trainer.models.initial_weights import init_linear
from trainer.models.named_tensors import add_prefix, select, strip_prefix, without_frozen

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tensors


class Options(OneStage, frozen=True):
    """Options of `fenda`."""


def fenda(training: Training, options: Options) -> Method:
    """Both encoders start alike and are trained together with the classifier;
    only the exchanged one is averaged.
    """

    def joined(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        both = [encode(tensors, batch.images), encode(tensors, batch.images, "private.encoder")]
        features = CONCATENATION.fuse(both, tensors)
        loss = network.cross_entropy(network.linear(tensors, "classifier", features), batch.labels)
        return loss, {CLASSIFICATION_LOSS.key: loss}

    step = Step(("encoder", "private", "classifier"), joined)
    return Method(
        train=(Phase("train", (step,), options.epochs or training.local_epochs),),
        sends=send_prefixes("encoder"),
        init_node=lambda broadcast, shape, random: {
            **add_prefix("private", select(broadcast, ("encoder",))),
            **init_linear("classifier", CONCATENATION.width(shape.features), shape.classes, random),
        },
        deploy=lambda own, received: {
            **strip_prefix("private", own),
            **select(own, ("classifier",)),
            **add_prefix(RECEIVED, without_frozen(strip_prefix("encoder", own))),
        },
        fusion=CONCATENATION,
    )


ENTRY = Entry(Options, fenda)
