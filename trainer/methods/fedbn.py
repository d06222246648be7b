"""FedBN (Li et al., 2021): FedAvg without the normalisation layers, which stay with each node."""

from typing import TypeVar

from broker_config.protocol.messages import Training
from trainer.methods.base import WHOLE, Entry, Method, OneStage, init_shared_classifier, plain_phase
from trainer.models.named_tensors import normalisation_layers, select

T = TypeVar("T")


class Options(OneStage, frozen=True):
    """Options of `fedbn`."""


def fedbn(training: Training, options: Options) -> Method:
    """A node serves the last average with its own normalisation layers
    (group normalisation's too).
    """

    def average_with_own(own: dict[str, T], received: dict[str, T]) -> dict[str, T]:
        return {**own, **received, **select(own, normalisation_layers(own))}

    def sends(broadcast: dict[str, T]) -> tuple[str, ...]:
        private = select(broadcast, normalisation_layers(broadcast))
        return tuple(name for name in broadcast if name not in private)

    return Method(
        train=(plain_phase(training, options.epochs),),
        sends=sends,
        init_server=init_shared_classifier,
        receive=average_with_own,
        deploy=lambda own, received: select(average_with_own(own, received), WHOLE),
        deploys_final=True,
    )


ENTRY = Entry(Options, fedbn)
