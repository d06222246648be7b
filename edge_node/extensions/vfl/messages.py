"""Messages of vertical federated learning (VFL): its settings,
and what is said besides arrays (those are `frames`).
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from broker_config.protocol.messages import (
    ClassName,
    CommonSpec,
    Finite,
    Identity,
    Message,
    Name,
    RunId,
    Seconds,
    SessionId,
    Stage,
    Validation,
)

Period = Annotated[int, Meta(ge=0, le=1 << 40)]  # rounds of VFL go on for years
Positive = Annotated[float, Meta(gt=0, le=1e6)]


class Window(Struct, frozen=True, kw_only=True):
    """Which products a round trains on (paper VII-B): `start` in the first round,
    `chunk` more in each later one.
    """

    start: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    chunk: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    size: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # the newest that count; 0: the set grows

    def span(self, round_: int) -> tuple[int, int]:
        """First and past-the-end position of the products of round 1, 2, ...,
        as the head counts them.
        """
        end = self.start + (round_ - 1) * self.chunk
        size = max(0, end - self.size) if self.size else 0
        return size, end


class Channel(Struct, frozen=True, kw_only=True):
    """Noise between sensor and head, in the order in which it strikes.

    All zero: a clean channel.
    """

    levels: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # of a uniform scalar quantiser; 0: none
    # values are rounded up or down by chance, so that the quantiser's error has mean zero
    dither: bool = False
    # of Gaussian noise, in standard deviations of the message
    sigma: Annotated[float, Meta(ge=0, le=1e3)] = 0.0
    # chance that a product's embedding arrives as zeros
    loss: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class Denoising(Struct, frozen=True, kw_only=True):
    """What the head does against noise: autoencoders that learn in the first `rounds` rounds
    (T_dl; 0: none).
    """

    rounds: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    shared: bool = True  # one autoencoder for all sensors, or one for each
    # what sensors send besides: the embedding, or another noisy copy of it
    target: Literal["clean", "noisy"] = "clean"
    # of each of those rounds, a step over its whole set each
    epochs: Annotated[int, Meta(ge=1, le=10_000)] = 20
    learning_rate: Positive = 1e-2  # Adam's (paper VII-C)
    # 0: the paper's 3 of 28 and 512 of 4096; else an eighth
    bottleneck: Annotated[int, Meta(ge=0, le=1 << 16)] = 0


class Recipe(Struct, frozen=True, kw_only=True):
    """Local training, the same for all parties."""

    eta: Positive = 0.01  # step of online gradient descent (eq. 5)
    # parts of a round's set, a step each; 1: as eq. 5 has it
    batches: Annotated[int, Meta(ge=1, le=100_000)] = 1


class Privacy(Struct, frozen=True, kw_only=True):
    """Noise that a sensor adds on purpose: each product's embedding is cut to `clip`,
    then gets Gaussian noise.
    """

    clip: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # Euclidean length; 0: no protection
    multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # of the noise, in lengths of `clip`


class VflSpec(CommonSpec, frozen=True, kw_only=True):
    """Settings of VFL, retained in the place of a federation's Spec:
    all that a sensor must know besides its data.
    """

    # in the order of the head's inputs
    sensors: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]
    network: str  # of the sensors (edge_node.extensions.vfl.networks)
    # rows of a sample: a product's own and those before it
    cycles: Annotated[int, Meta(ge=1, le=10_000)] = 1
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=2, max_length=1000)]
    # expectation: classes are numbers, their mean is the result
    reading: Literal["class", "expectation"] = "class"
    # server: labels stay at the head, which sends gradients instead
    labels: Literal["shared", "server"] = "shared"
    window: Window = Window()
    channel: Channel = Channel()
    denoising: Denoising = Denoising()
    recipe: Recipe = Recipe()
    privacy: Privacy = Privacy()
    iterations: Annotated[int, Meta(ge=1, le=1000)] = 2  # E_max
    # E_{t,0}; 0: as many as the busiest sensor takes
    head_iterations: Annotated[int, Meta(ge=0, le=1000)] = 0
    # who decides E_{t,k}: a rule, or an agent's file (edge_node.extensions.vfl.policies.selection)
    policy: str = "deadline"
    absent: Literal["wait", "last", "impute"] = "wait"  # what a round does without a sensor
    patience: Seconds = 10.0  # for a sensor, before `absent` counts
    # rounds that a kill may cost: they are replayed
    commit: Annotated[int, Meta(ge=1, le=10_000)] = 20
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    # of this protocol, with which the run began; see `REVISION`
    revision: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

    def steps_of_head(self, iterations: Sequence[int]) -> int:
        """E_{t,0}: the head's local iterations in a round in which sensors take so many."""
        return self.head_iterations or max(iterations)


class VflHello(Message, frozen=True, kw_only=True):
    """Sensor -> head: let me take part. `round` is the last one that its model has learnt from."""

    session: SessionId
    run: RunId
    software: str
    identity: Identity
    incarnation: Annotated[int, Meta(ge=0, le=1 << 40)]
    columns: Annotated[int, Meta(ge=1, le=10_000)]
    round: Period
    # rounds whose end it can go back to
    kept: Annotated[tuple[Period, ...], Meta(max_length=8)] = ()
    lacks: Annotated[str, Meta(max_length=300)] = ""  # what its round waits for, in words
    # of this protocol, that it knows; see `REVISION`
    revision: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class SensorState(Struct, frozen=True, kw_only=True):
    """One sensor, as the head sees it."""

    name: Name
    present: bool
    # from the round's opening to its embeddings, in the last round that had them
    latency: Seconds | None = None
    iterations: Annotated[int, Meta(ge=0, le=1000)] = 0  # in the last round; 0: none
    lacks: Annotated[str, Meta(max_length=300)] = ""  # what it waits for, in words


class VflOverview(Message, frozen=True, kw_only=True):
    """Progress of VFL, retained where a federation's Overview would be."""

    run: RunId
    time: Annotated[datetime, Meta(tz=True)]  # by the head's clock, for display
    round: Period  # the last one that is closed
    status: Stage
    paused: bool = False  # it waits for sensors, or for products
    awaited: Annotated[str, Meta(max_length=1000)] = ""  # what for, in words
    loss: Finite | None = None  # of the last round, before its local iterations
    validation: Validation | None = None
    rate: Seconds = 0.0  # rounds a second, lately
    sensors: tuple[SensorState, ...] = ()
