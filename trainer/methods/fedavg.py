"""FedAvg (McMahan et al., 2017): one model for all, averaged by the number of training images."""

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    WHOLE,
    Entry,
    Method,
    OneStage,
    init_shared_classifier,
    plain_phase,
    send_prefixes,
)
from trainer.models.named_tensors import select


class Options(OneStage, frozen=True):
    """Options of `fedavg`."""


def fedavg(training: Training, options: OneStage) -> Method:
    """Encoder and classifier are received, trained and averaged;
    the last average is what every node serves.
    """
    return Method(
        train=(plain_phase(training, options.epochs),),
        sends=send_prefixes(*WHOLE),
        init_server=init_shared_classifier,
        deploy=lambda own, received: select(received, WHOLE),
        deploys_final=True,
    )


ENTRY = Entry(Options, fedavg)
