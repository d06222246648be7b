"""FedRep (Collins et al., 2021, Algorithm 1): first the node's head alone,
then the shared body alone.
"""

from typing import Annotated

import msgspec

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    Entry,
    Method,
    Phase,
    Step,
    classification_loss,
    init_private_classifier,
    send_prefixes,
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `fedrep`."""

    head_epochs: Annotated[int, msgspec.Meta(ge=0)] = 0  # a round; 0 = the spec's local_epochs
    body_epochs: Annotated[int, msgspec.Meta(ge=0)] = 0  # likewise


def fedrep(training: Training, options: Options) -> Method:
    """The classifier is trained on the received encoder, which is frozen; then the encoder,
    the classifier frozen.
    """
    return Method(
        train=(
            Phase(
                "head",
                (Step(("classifier",), classification_loss),),
                options.head_epochs or training.local_epochs,
            ),
            Phase(
                "body",
                (Step(("encoder",), classification_loss),),
                options.body_epochs or training.local_epochs,
            ),
        ),
        sends=send_prefixes("encoder"),
        init_node=init_private_classifier,
    )


ENTRY = Entry(Options, fedrep)
