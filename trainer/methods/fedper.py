"""FedPer (Arivazhagan et al., 2019): the encoder is averaged, each node keeps its classifier."""

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    Entry,
    Method,
    OneStage,
    init_private_classifier,
    plain_phase,
    send_prefixes,
)


class Options(OneStage, frozen=True):
    """Options of `fedper`."""


def fedper(training: Training, options: Options) -> Method:
    """FedAvg of the encoder alone.

    The node serves the model as it has trained it, not the average made after that.
    """
    return Method(
        train=(plain_phase(training, options.epochs),),
        sends=send_prefixes("encoder"),
        init_node=init_private_classifier,
    )


ENTRY = Entry(Options, fedper)
