"""SCAFFOLD (Karimireddy et al., 2020, Algorithm 1, option II):
control variates against the nodes' drift.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    WHOLE,
    Batch,
    Encode,
    Entry,
    Method,
    OneStage,
    Sgd,
    classification_loss,
    init_shared_classifier,
    plain_phase,
    send_prefixes,
)
from trainer.methods.fedavg import fedavg
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, add_prefix, is_trainable, select, strip_prefix

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tensors


class Options(OneStage, frozen=True):
    """Options of `scaffold`."""

    # of SGD, which the method assumes, instead of Adam's
    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.003


def scaffold(training: Training, options: Options) -> Method:
    """FedAvg whose every step is corrected by c - c_i: y <- y - rate * (grad - c_i + c).

    Shared are the model and the change of c_i; nodes count alike, and c moves by their mean times
    their share of all. A node whose contribution came too late has moved its c_i all the same; c
    lacks that change.
    """

    def corrected(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = classification_loss(network, tensors, batch, encode)
        own, received = (
            network.flat(strip_prefix("control", each), WHOLE) for each in (tensors, batch.received)
        )
        return loss + (network.flat(tensors, WHOLE) * (received - own)).sum(), metrics

    def change(tensors: Tensors, received: Tensors) -> Tensors:
        """c_i's change: -c + (x - y) / (steps * rate)."""
        scale = float(tensors["steps"]) * options.rate
        return {
            f"control.{name}": (received[name] - tensors[name]) / scale - value
            for name, value in strip_prefix("control", received).items()
        }

    def after(tensors: Tensors, received: Tensors, steps: int) -> Tensors:
        tensors = {**tensors, "steps": tensors["steps"].new_tensor(float(steps))}
        return {
            **tensors,
            **{name: tensors[name] + value for name, value in change(tensors, received).items()},
        }

    phase = plain_phase(training, options.epochs, corrected)
    return fedavg(training, options)._replace(
        train=(phase._replace(sgd=Sgd(options.rate), after=after),),
        sends=send_prefixes(*WHOLE, "control"),
        init_server=_init_server,
        init_node=lambda broadcast, shape, random: {"steps": np.zeros((), np.float32)},
        receive=lambda own, received: {**own, **select(received, WHOLE)},
        contribute=lambda own, received: {**own, **change(own, received)},
        measure=lambda metrics, images: 1.0,
        weight_meaning="1, as every node's",
        weigh=lambda raw: 1.0,
        weight_cap=1.0,
        only_mean=(
            "the server's control variate must be the mean of the nodes' own, or their steps drift"
        ),
        finish=_finish,
    )


def _init_server(encoder: Arrays, shape: Shape, random: np.random.Generator) -> Arrays:
    model = {**encoder, **init_shared_classifier(encoder, shape, random)}
    controls = {name: np.zeros_like(value) for name, value in model.items() if is_trainable(name)}
    return {**select(model, ("classifier",)), **add_prefix("control", controls)}


def _finish(broadcast: Arrays, mean: Arrays, present: float) -> Arrays:
    moved = {
        name: broadcast[name] + np.float32(present) * value
        for name, value in select(mean, ("control",)).items()
    }
    return {**broadcast, **mean, **moved}


ENTRY = Entry(Options, scaffold)
