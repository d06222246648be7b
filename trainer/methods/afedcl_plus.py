"""AFedCL+: plants share the classifier too, and the consensus head begins and ends what they train.

Sums first: the head of all plants' features classifies before anybody has trained, and fine-tuning
starts from it, as after linear probing (Kumar et al., ICLR 2022; in federated learning Legate et
al., NeurIPS 2023). Then encoder and classifier are trained and averaged as in FedAvg. The mean of
the first and the trained encoder (as WiSE-FT, Wortsman et al., CVPR 2022, takes the mean of a
network before and after fine-tuning) is what all are served. Sums again: each plant's classifier is
made of that encoder's.

What else was tried, AFedCL's adversary and weights among it, did not earn a place:
research/results/afedcl/README.md.
"""

from __future__ import annotations

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
    init_shared_classifier,
    plain_phase,
    send_prefixes,
)
from trainer.methods.statistics_head import statistics_head
from trainer.models.fusion import LENGTH, NORMALISED
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, average, select

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tensors

_ROUNDS = 12  # on tuning images more bring nothing that can be told from chance


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `afedcl_plus`."""

    # a round; 0 = twice the spec's local_epochs, as AFedCL's two stages
    epochs: Annotated[int, msgspec.Meta(ge=0)] = 0


def afedcl_plus(training: Training, options: Options) -> Method:
    """Sums, rounds of training with a shared classifier of normalised features, sums."""
    return Method(
        train=(
            plain_phase(training, options.epochs or 2 * training.local_epochs, normalised_loss),
        ),
        sends=send_prefixes(*WHOLE),
        rounds=_ROUNDS,
        init_server=_init_server,
        settle=_settle,
        deploy=lambda own, received: select(received, (*WHOLE, LENGTH)),
        deploys_final=True,
        statistics=statistics_head(first=True),
        fusion=NORMALISED,
    )


def normalised_loss(
    network: Network, tensors: Tensors, batch: Batch, encode: Encode
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the classifier on features of length one, of which the head's sums are."""
    features = NORMALISED.fuse([encode(tensors, batch.images)], tensors)
    loss = network.cross_entropy(network.linear(tensors, "classifier", features), batch.labels)
    return loss, {CLASSIFICATION_LOSS.key: loss}


def _settle(first: Arrays, trained: Arrays) -> Arrays:
    """Return the trained broadcast with the mean of the first and the trained encoder.

    Training forgets what other plants' classes need; the mean keeps most of what it gains, and
    forgets less (docs/results.md).
    """
    encoder = select(trained, ("encoder",))
    return {**trained, **average(select(first, ("encoder",)), encoder)}


def _init_server(encoder: Arrays, shape: Shape, random: np.random.Generator) -> Arrays:
    """The classifier's values are replaced by those of the sums;
    they set the range of what may be sent.
    """
    return {**init_shared_classifier(encoder, shape, random), LENGTH: np.ones((), np.float32)}


ENTRY = Entry(Options, afedcl_plus)
