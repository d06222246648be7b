"""No-FL: every node trains alone, from the coordinator's initial encoder. Nothing leaves it."""

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
    """Options of `local`."""


def local(training: Training, options: Options) -> Method:
    """The baseline without federation."""
    return Method(
        train=(plain_phase(training, options.epochs),),
        sends=send_prefixes(),
        only_mean="nothing leaves a node",
        init_node=init_private_classifier,
        receive=lambda own, received: own,
    )


ENTRY = Entry(Options, local)
