"""Training alone, for comparison: the same images and budget as in the federation,
without what others send.
"""

from typing import NamedTuple

import msgspec

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import count_training_rounds
from trainer.methods import NO_FEDERATION, complete_options, make
from trainer.methods.base import ROUNDS
from trainer.models.named_tensors import Arrays
from trainer.models.network import Tensors


class NotComparableError(EdgeNodeError):
    """What the node would have learnt without others is lost."""


class TrainedAlone(NamedTuple):
    """A node's model that was trained without others."""

    initial: Arrays  # encoder that it began with
    tensors: Tensors


def trains_alone(spec: Spec) -> bool:
    """Whether the federation's method is the baseline itself:
    then there is nothing to compare with.
    """
    return spec.method == NO_FEDERATION


def alone_spec(spec: Spec) -> Spec:
    """The spec with which a node of the federation `spec` trains alone, for as many epochs.

    Where the federation trains nothing, the node does so for as long as federations usually do.
    """
    epochs = count_epochs(spec)
    rounds = count_training_rounds(spec)
    options = complete_options(NO_FEDERATION, {"epochs": epochs})
    return msgspec.structs.replace(
        spec,
        method=NO_FEDERATION,
        options=options,
        sends=(),
        rounds=rounds or ROUNDS,
        relays={},
        head="trained",
        statistics={},
        statistics_first=False,
        privacy=None,  # nothing leaves the node
    )


def count_epochs(spec: Spec) -> int:
    """Epochs of training in a round, both stages;
    phases that end when their losses have settled do not count.
    """
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    return sum(
        phase.epochs
        for phase in method.train + method.refine
        if phase.steps[0].trains and not phase.is_settled
    )
