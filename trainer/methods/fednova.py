"""FedNova (Wang et al., 2020, eqs.

9 and 11): updates are normalised by the steps that made them, then averaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    WHOLE,
    Entry,
    Method,
    OneStage,
    Sgd,
    init_shared_classifier,
    plain_phase,
    send_prefixes,
)
from trainer.methods.fedavg import fedavg
from trainer.models.named_tensors import Arrays, is_trainable, select

if TYPE_CHECKING:
    from trainer.models.network import Tensors

# the sums leave room for values well above a tensor's first ones; this is the first of `steps`
_RANGE = 4096.0


class Options(OneStage, frozen=True):
    """Options of `fednova`."""

    # of SGD, which the method assumes, instead of Adam's
    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.003
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


def fednova(training: Training, options: Options) -> Method:
    """w <- w - (sum p_i a_i) * sum p_i (w - w_i) / a_i, with p_i the share of images;
    FedAvg when all a_i are equal.
    """
    phase = plain_phase(training, options.epochs)._replace(
        sgd=Sgd(options.rate, options.momentum),
        after=lambda tensors, received, steps: {
            **tensors,
            "steps": tensors["steps"].new_tensor(effective_steps(steps, options.momentum)),
        },
    )
    return fedavg(training, options)._replace(
        train=(phase,),
        sends=send_prefixes(*WHOLE, "steps"),
        init_server=lambda encoder, shape, random: {
            **init_shared_classifier(encoder, shape, random),
            "steps": np.full((), _RANGE, np.float32),
        },
        contribute=_normalised,
        only_mean=(
            "what is sent are updates divided by steps, and the steps, which make no model together"
        ),
        finish=_finish,
    )


def effective_steps(steps: int, momentum: float) -> float:
    """a_i: how many gradients an update of `steps` steps amounts to;
    steps themselves without momentum.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def _normalised(own: Tensors, received: Tensors) -> Tensors:
    """(w - w_i) / a_i; of BatchNorm's statistics, which no gradient moves,
    the difference itself.
    """
    changes = {}
    for name, value in select(own, WHOLE).items():
        steps = own["steps"] if is_trainable(name) else 1
        changes[name] = (received[name] - value) / steps
    return {
        "steps": own["steps"],
        **changes,
    }


def _finish(broadcast: Arrays, mean: Arrays, present: float) -> Arrays:
    moved = {}
    for name, value in select(mean, WHOLE).items():
        steps = mean["steps"] * value if is_trainable(name) else value
        moved[name] = broadcast[name] - steps
    return {**broadcast, **moved}


ENTRY = Entry(Options, fednova)
