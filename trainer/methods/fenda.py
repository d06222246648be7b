"""FENDA (Kim et al., 2016; federated: Tavakoli et al., 2023): an exchanged encoder joined with a private one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_config.protocol.messages import Training
from trainer.methods.base import Batch, Encode, Method, OneStage, Phase, Step, share
from trainer.models.initial_weights import linear
from trainer.models.named_tensors import pick, put_under, take_from, without_frozen

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tree


class Options(OneStage, frozen=True):
    """Options of `fenda`."""


def fenda(training: Training, options: Options) -> Method:
    """Both encoders start alike and are trained together with the classifier; only the exchanged one is averaged."""

    def joined(network: Network, tree: Tree, batch: Batch, encode: Encode) -> tuple[Tensor, dict[str, Tensor]]:
        features = network.join(encode(tree, batch.images), encode(tree, batch.images, "private.encoder"))
        loss = network.cross_entropy(network.linear(tree, "classifier", features), batch.labels)
        return loss, {"L_C": loss}

    step = Step(("encoder", "private", "classifier"), joined)
    return Method(
        train=(Phase("train", (step,), options.epochs or training.local_epochs),),
        sends=share("encoder"),
        init_node=lambda broadcast, shape, random: {
            **put_under("private", pick(broadcast, ("encoder",))),
            **linear("classifier", 2 * shape.features, shape.classes, random),
        },
        deploy=lambda own, received: {
            **take_from("private", own),
            **pick(own, ("classifier",)),
            **put_under("received", without_frozen(take_from("encoder", own))),
        },
    )
