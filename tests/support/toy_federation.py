"""A federation of two plants on a network small enough to compute its rounds by hand.

Encoder f = e x with e = 2; classifier logits (c0 f + b0, c1 f + b1) with c = (1, 0) and b = (-2,
0). Every image is x = 1. Plant a has one of class 0, plant b three of class 1. Adam's first step
knows only a gradient's sign, so here all descend by SGD, at a rate of 0.1. Participants, sums and
the server's step are the real ones.

At the start f = 2, the logits are (0, 0) and p = (1/2, 1/2). Plant a: the logits' gradient is
(-1/2, 1/2), hence de = -1/2, dc = (-1, 1), db = (-1/2, 1/2); plant b: the same with the other sign.
After one step

    plant a: e = 2.05, c = (1.1, -0.1), b = (-1.95, -0.05)      plant b: e = 1.95, c = (0.9, 0.1), b
    = (-2.05, 0.05) mean 1:3: e = 1.975, c = (0.95, 0.05), b = (-2.025, 0.025)
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from broker_config.protocol.messages import Preprocessing, Spec, TensorSpec, Training
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.aggregation import FixedPointSum, scale_for
from trainer.methods import complete_options, make
from trainer.methods.base import Method, Phase, Sgd
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Network, Tensors, to_arrays, to_tensors
from trainer.training import participant
from trainer.training.participant import Participant, State

RATE = 0.1
PLAIN = Sgd(RATE)
NORM = "encoder.norm.weight"
Model = tuple[float, tuple[float, float], tuple[float, float]]  # e, c, b
START: Model = (2, (1, 0), (-2, 0))
A: Model = (2.05, (1.1, -0.1), (-1.95, -0.05))
B: Model = (1.95, (0.9, 0.1), (-2.05, 0.05))
MEAN: Model = (1.975, (0.95, 0.05), (-2.025, 0.025))


class Toy(Network):
    """An encoder of one weight and, in some trees,
    a scale of its feature that counts as a normalisation layer.
    """

    def __init__(self, model: str = "toy", classes: int = 2) -> None:
        self.shape = Shape(1, classes)

    @property
    def has_stem(self) -> bool:
        return False

    def check(self, tensors: Tensors, source: str) -> None:
        """It fits."""

    def encode(
        self, tensors: Tensors, images: Tensor, *, prefix: str = "encoder", training: bool = False
    ) -> Tensor:
        features = images[:, 0, 0, :1] @ tensors[f"{prefix}.weight"].T
        return (
            features * tensors[f"{prefix}.norm.weight"]
            if f"{prefix}.norm.weight" in tensors
            else features
        )


def values(model: Model) -> Arrays:
    e, c, b = model
    named = {"encoder.weight": [[e]], "classifier.weight": [[c[0]], [c[1]]], "classifier.bias": b}
    return {name: np.asarray(value, np.float32) for name, value in named.items()}


def descend(
    model: Model, label: int, rate: float = RATE, pull: float = 0, to: Model = START
) -> Model:
    """One step on x = 1: the logits' gradient is g = p - y, hence de = c . g, dc = e g,
    db = g; pull adds its own.
    """
    e, c, b = model
    logit = (c[0] - c[1]) * e + b[0] - b[1]
    g = (1 / (1 + math.exp(-logit)) - (label == 0)) * np.array([1.0, -1.0])
    de, dc, db = (
        np.dot(c, g) + pull * (e - to[0]),
        e * g + pull * np.subtract(c, to[1]),
        g + pull * np.subtract(b, to[2]),
    )
    return float(e - rate * de), tuple(np.subtract(c, rate * dc)), tuple(np.subtract(b, rate * db))


def images(count: int, label: int, x: int = 1) -> Images:
    digests = tuple(f"{label}{index:063x}" for index in range(count))
    pixels = np.full((count, 1, 1, 3), 255 * x, np.uint8)
    return Images(
        LabelledImages(pixels, np.full(count, label), digests, tuple(map(Path, digests))), None
    )


PLANTS = {"a": images(1, 0), "b": images(3, 1)}


class Federation(NamedTuple):
    """What rounds have left: the broadcast that the last one started from,
    the one after it, what the plants carry.
    """

    method: Method
    received: Arrays
    broadcast: Arrays
    states: dict[str, State]

    def deployed(self, plant: str) -> Tensors:
        seen = self.broadcast if self.method.deploys_final else self.received
        return self.method.deploy(self.states[plant].tensors, to_tensors(seen))


def federate(
    name: str,
    rounds: int = 1,
    plants: Mapping[str, Images] = PLANTS,
    begin: Mapping[str, Any] = {},
    stop: Callable[[], bool] = participant.never_stop,
    training: Mapping[str, Any] = {},
    nodes: int = 2,
    sgd: Sgd = PLAIN,
    **options: Any,
) -> Federation:
    """Rounds of a method, by participants, sums and server as they are but for the network and
    SGD instead of Adam.

    Args:
        name: of the method.
        rounds: how many.
        plants: their images.
        begin: tensors that differ from START's; `a/NAME` is plant a's alone.
        stop: asked between batches.
        training: settings.
        nodes: how many the federation has.
        sgd: wherever the method has no rate of its own.
        options: of the method; `lam` is lambda.
    """
    complete = complete_options(
        name, {key.replace("lam", "lambda"): value for key, value in options.items()}
    )
    settings = Training(**{"local_epochs": 1, "augment": False, **training})
    method = make(name, settings, complete)
    begin = {
        **to_tensors(values(START)),
        **{n: torch.as_tensor(value, dtype=torch.float32) for n, value in begin.items()},
    }
    encoder = to_arrays(select(begin, ("encoder",)))
    broadcast = {**encoder, **method.init_server(encoder, Shape(1, 2), np.random.default_rng(0))}
    broadcast |= {n: value for n, value in to_arrays(begin).items() if n in broadcast}
    spec = Spec(
        federation="toy",
        run="0" * 16,
        software="",
        method=name,
        options=complete,
        model="toy",
        classes=("0", "1"),
        preprocessing=Preprocessing(size=1, mean=(0, 0, 0), std=(1, 1, 1)),
        training=settings,
        rounds=rounds,
        nodes=nodes,
        quorum=1,
        seed=0,
        sends=method.sends(broadcast),
        tensors={
            n: TensorSpec(value.shape, scale_for(value, nodes)) for n, value in broadcast.items()
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(participant, "Network", Toy)
        patch.setattr(participant, "make", lambda *arguments: _descending(make(*arguments), sgd))
        participants = {plant: Participant(spec, plant, share) for plant, share in plants.items()}
    states = {}
    for plant, each in participants.items():
        tensors = each.start(broadcast).tensors
        mine = {
            n.removeprefix(f"{plant}/"): value
            for n, value in begin.items()
            if n.startswith(f"{plant}/")
        }
        states[plant] = State(
            {n: {**begin, **mine}.get(n, value).clone() for n, value in tensors.items()}, {}
        )
    received = broadcast
    for round_ in range(1, rounds + 1):
        received, sums = (
            broadcast,
            FixedPointSum(select(spec.tensors, spec.sends), nodes, method.weight_cap),
        )
        for plant, each in participants.items():
            state, sent, _ = each.contribute(states[plant], received, round_, stop)
            sums.validate(sent.tensors.items())
            sums.add(sent.tensors.items(), method.weigh(sent.weight))
            states[plant], _ = each.refine(state, received, round_)
        broadcast = method.finish(broadcast, sums.mean(), len(participants) / nodes)
    return Federation(method, received, broadcast, states)


def _descending(method: Method, sgd: Sgd) -> Method:
    def slowly(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        return tuple(phase._replace(sgd=phase.sgd or sgd) for phase in phases)

    return method._replace(train=slowly(method.train), refine=slowly(method.refine))


def agree(found: Mapping[str, Any], by_hand: Mapping[str, Any]) -> None:
    """`found` holds at least the tensors of `by_hand`, with their values."""
    for name, value in by_hand.items():
        np.testing.assert_allclose(
            np.asarray(found[name]), np.asarray(value), rtol=2e-6, atol=2e-6, err_msg=name
        )
