"""A method as a value: what is trained against which loss, what leaves the node,
and how it is explained to people.

The engine owns steps, optimiser, batches and random numbers. A method's file imports no torch:
whatever needs torch reaches a loss as an argument. So the coordinator, which only weighs and
averages, runs where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec
import numpy as np

from broker_config.protocol.messages import ImagePrivacy, TensorSpec, Training
from trainer.models.fusion import SINGLE, Fusion
from trainer.models.initial_weights import Shape, init_linear
from trainer.models.named_tensors import Arrays, is_frozen, select, without_frozen

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from trainer.data.training_set import TrainingSet
    from trainer.models.network import Network, Tensors
    from trainer.privacy.patch_protection import SentPatches
    from trainer.statistics.private_sums import Normal

Metrics = dict[str, float]
WHOLE = ("encoder", "classifier")
"""The plain model."""

MODEL = "efficientnet_lite0_mid"
"""The model of a federation, if neither it nor its method names one."""
ROUNDS = 30
"""Rounds in which a federation trains, if neither it nor its method names a number."""

MAX_IMAGES_WEIGHT = 4096.0


def weigh_by_images(raw: float) -> float:
    """FedAvg's weight, the number of training images.

    More than MAX_IMAGES_WEIGHT count as that many.

    Raises:
        ValueError: not a positive whole number.
    """
    if raw < 1 or raw != int(raw):
        raise ValueError(f"a number of training images cannot be {raw!r}")
    return min(raw, MAX_IMAGES_WEIGHT)


class Metric(NamedTuple):
    """A metric that nodes report, as it is explained to people."""

    # its name in reports of losses, histories and telemetry; a subscript follows an underscore
    key: str
    title: str
    meaning: str  # one sentence
    # a value that its curve is compared with, and how that is written
    level: tuple[float, str] | None = None
    headline: bool = False  # whether it is shown before others where there is little room


CLASSIFICATION_LOSS = Metric(
    "L_C", "classification loss", "Stage 1, on the node's training images."
)


EPSILON = Metric(
    "epsilon",
    "epsilon spent",
    "What all that has left the node so far may tell of one training image, at most (delta 1e-5).",
    headline=True,
)
"""Reported by the nodes of private federations, whatever their method."""


class Batch(NamedTuple):
    """Inputs of a loss besides the tensors."""

    images: Tensor  # float32 [b, 3, S, S], normalised, augmented
    labels: Tensor  # int64 [b]
    reference: (
        Tensor | None
    )  # the received encoder's features [b, features] of the same view; where the phase asks for it
    received: Tensors  # the round's broadcast, frozen
    random: Generator | None = None  # the phase's own; where it draws


class Encode(Protocol):
    """An encoder as the phase runs it: images [n, 3, S, S] -> features [n, features].

    Its tensors lie below `prefix`, whose last part is `encoder`.
    """

    def __call__(  # noqa: D102
        self,
        tensors: Tensors,
        images: Tensor,
        prefix: str = "encoder",
    ) -> Tensor: ...


Loss = Callable[["Network", "Tensors", Batch, Encode], "tuple[Tensor, dict[str, Tensor]]"]
"""(network, tensors, batch, encode) -> (scalar to descend, metrics to report;
a phase reports one or more).
"""


class Step(NamedTuple):
    """One optimiser step on a batch: the tensors under `trains` descend `loss`.

    Without any, it is only measured.
    """

    trains: tuple[str, ...]
    loss: Loss


class Sgd(NamedTuple):
    """Stochastic gradient descent, at rest when a phase begins."""

    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0


class Phase(NamedTuple):
    """One stretch of local training: its steps are taken in turn on every batch."""

    name: str  # keys the phase's random numbers
    steps: tuple[Step, ...]
    epochs: int
    uses_reference: bool = False
    rates: Mapping[str, float] = {}  # learning rate of a prefix, where it differs from the spec's
    bounds: Mapping[str, tuple[float, float]] = {}  # a tensor is clamped to this after each step
    sgd: Sgd | None = None  # instead of the spec's optimiser
    share: float = 1.0  # of the node's images, drawn anew
    # Asked after each epoch: (tensors, received ones, each epoch's mean of the first metric) ->
    # whether that is enough.
    is_settled: Callable[[Tensors, Tensors, Sequence[float]], bool] | None = None
    # What becomes of the trained tensors: (tensors, received ones, optimiser steps taken) ->
    # tensors.
    after: Callable[[Tensors, Tensors, int], Tensors] = lambda tensors, received, steps: tensors
    # whether its losses draw random numbers; such a phase trains one node at a time
    draws: bool = False


class Relay(NamedTuple):
    """Exchange between nodes beside the average:
    what each node sends in addition to the tensors under `sends`.

    It is not averaged: the coordinator checks it and passes it on in tensors of the broadcast that
    no node contributes.
    """

    # What each node sends, from the first broadcast: name -> shape.
    shapes: Callable[[Arrays], Mapping[str, tuple[int, ...]]]
    # How it is made, before training: (network, received tensors, training images, random numbers)
    # -> tensors.
    make: Callable[[Network, Tensors, TrainingSet, np.random.Generator], Arrays]
    # ValueError if finite tensors of these shapes are not what an honest node sends: (tensors,
    # number of classes).
    check: Callable[[Arrays, int], None]
    # What the next broadcast holds of it: (broadcast, what was sent by node, nodes that were to
    # contribute and have not) -> tensors of the broadcast. It must not depend on the order of the
    # nodes.
    merge: Callable[[Arrays, Mapping[str, Arrays], Collection[str]], Arrays]
    # How images are protected in it, in words; empty if they are not. If they are, a node draws the
    # random numbers for it from a secret of its own: whoever knows the seed could undo the
    # protection.
    protection: str
    # A node's demands on that protection that are not met, in words; empty if all are: (option ->
    # value) -> words.
    unmet_demands: Callable[[Mapping[str, object]], str]
    # How patches of maps are made, if these are what it sends: so attacks on them can be tried.
    patches: SentPatches | None


class Statistics(NamedTuple):
    """Sums that every node contributes in a last round,
    in which nothing is trained and no model is sent.

    They are int64, on a fixed grid: added as they are, all nodes alike. The result of the run holds
    their totals beside the model; a node keeps its own among its tensors, and what has left of them
    under the totals' names.
    """

    # What each node contributes, from the broadcast: name -> int64 tensor.
    shapes: Callable[[Arrays, Shape], Mapping[str, TensorSpec]]
    # What the sums are of: (network, received tensors, n images) -> arrays [n, ...]. No image
    # changes another's row, so rows are computed once, and summed without some of the images as if
    # there had never been these.
    features: Callable[[Network, Tensors, TrainingSet], Arrays]
    # A node's sums: (rows of `features`, labels [n], number of classes) -> int64 arrays.
    make: Callable[[Arrays, np.ndarray, int], Arrays]
    # ValueError if arrays of these shapes are not what an honest node sends: (sums, number of
    # classes).
    check: Callable[[Arrays, int], None]
    # ValueError if totals without a node's own cannot be others' sums: (others' totals, most
    # nodes).
    check_totals: Callable[[Arrays, int], None]
    # The personal model: (network, the node's sums, the result of the run with the other nodes'
    # totals, whether it will be served) -> the tensors of its `classifier` and of what `fusion`
    # takes. What only the line needs may be missing where it will not be.
    deploy: Callable[[Network, Tensors, Tensors, bool], Tensors]
    fusion: Fusion
    # Where nodes contribute them also before any training, of the first broadcast: what training
    # begins with, (broadcast, totals) -> broadcast.
    begin: Callable[[Arrays, Arrays], Arrays] | None = None
    # The same where no single image shall be told from what leaves a node; None where that cannot
    # be had.
    private: Callable[[ImagePrivacy], Statistics] | None = None
    # There: what leaves of a node's sums, (network, received tensors, training images, sums, the
    # node's own noise) -> arrays of `shapes`. Elsewhere the sums leave as they are.
    release: Callable[[Network, Tensors, TrainingSet, Arrays, Normal], Arrays] | None = None
    # The name among `features` of those of eight views as the encoder gives them, if they are there
    # as they are: a projection is not.
    views: str | None = None


class Method(NamedTuple):
    """A federated method. State goes in and comes out; nothing is changed behind the caller's back.

    The defaults are FedAvg's, but for what is deployed: the model as the node has trained it.
    """

    train: tuple[Phase, ...]  # stage 1
    # Prefixes of what leaves the node after stage 1, from the broadcast's names and shapes.
    sends: Callable[[Arrays], tuple[str, ...]]
    rounds: int = ROUNDS  # in which it trains, if a federation names no number
    model: str = MODEL  # that it trains, if a federation names none
    # What the coordinator adds to the initial encoder (names below `encoder.`) to make the first
    # broadcast.
    init_server: Callable[[Arrays, Shape, np.random.Generator], Arrays] = (
        lambda encoder, shape, random: {}
    )
    # Other models, whose encoders the broadcast holds beside, each below `candidate.` and its name.
    others: tuple[str, ...] = ()
    # What a node has from the start besides the broadcast that it is given.
    init_node: Callable[[Arrays, Shape, np.random.Generator], Arrays] = (
        lambda broadcast, shape, random: {}
    )
    # What of a broadcast is for a node: (broadcast, the node's name) -> received tensors.
    admit: Callable[[Arrays, str], Arrays] = lambda broadcast, node: broadcast
    # Before training: (own tensors, received ones) -> the tensors that are trained.
    receive: Callable[[Tensors, Tensors], Tensors] = lambda own, received: {**own, **received}
    # What the names under `sends` hold when they leave: (own tensors after stage 1, received ones)
    # -> tensors.
    contribute: Callable[[Tensors, Tensors], Tensors] = lambda own, received: own
    # What a node makes of features of its training images, each as it is: (own tensors, received
    # ones, float32 [n, features] by the encoder among the own, labels [n]) -> own tensors. Called
    # after stage 1, before the node contributes, and on what a broadcast that is deployed replaces
    # of the own tensors, before `deploy`.
    adapt: Callable[[Tensors, Tensors, np.ndarray, np.ndarray], Tensors] | None = None
    # What the node measures as its weight: (metrics of stage 1, training images) -> raw weight.
    measure: Callable[[Metrics, int], float] = lambda metrics, images: float(images)
    weight_meaning: str = "its number of training images"  # what it measures, in words
    # The coordinator's reading of it: raw weight -> weight in (0, weight_cap]; ValueError if it
    # cannot be honest.
    weigh: Callable[[float], float] = weigh_by_images
    weight_cap: float = MAX_IMAGES_WEIGHT
    # Why no rule but the mean can aggregate what is sent; empty where that is the node's model, or
    # a part of it.
    only_mean: str = ""
    # why its contributions cannot be summed behind masks; empty where they can
    unmaskable: str = ""
    # The next broadcast: (broadcast, weighted mean of the contributions, share of the nodes that
    # contributed).
    finish: Callable[[Arrays, Arrays, float], Arrays] = lambda broadcast, mean, share: {
        **broadcast,
        **mean,
    }
    # What the broadcast after the last round of training becomes: (the run's first broadcast, that
    # one) -> broadcast. Without it, it stays as it is.
    settle: Callable[[Arrays, Arrays], Arrays] | None = None
    relay: Relay | None = None  # what nodes exchange beside the average
    # what they contribute once, after training; it replaces `deploy`
    statistics: Statistics | None = None
    # stage 2, while the upload is under way; changes nothing of what was sent
    refine: tuple[Phase, ...] = ()
    # The personal model: (own tensors, broadcast) -> the tensors of its `classifier` and of what
    # `fusion` takes.
    deploy: Callable[[Tensors, Tensors], Tensors] = lambda own, received: select(own, WHOLE)
    # Whether `deploy` takes the broadcast that the last round started from, or the one made after
    # it.
    deploys_final: bool = False
    # how the features of the personal model's encoders become its classifier's
    fusion: Fusion = SINGLE
    # all that its losses and `inspect` report, in order of charts
    metrics: tuple[Metric, ...] = (CLASSIFICATION_LOSS,)
    # Metrics read from the node's tensors after stage 2: own tensors -> metrics.
    inspect: Callable[[Tensors], Metrics] = lambda own: {}
    # A warning for those who run a federation, given once: (round, metrics by node) -> text; empty
    # if there is none.
    notice: Callable[[int, Mapping[str, Metrics]], str] = lambda round_, metrics: ""


Factory = Callable[..., Method]


class Entry(NamedTuple):
    """How to make a method from its options; what a package registers among `edge_node.methods`.

    >>> ENTRY = Entry(Options, fedavg)  # fedavg(training, options) -> Method
    """

    options: type[msgspec.Struct]
    factory: Factory


def sent_tensors(method: Method, first: Arrays) -> tuple[str, ...]:
    """Prefixes of the tensors that leave a node, without those that training cannot change.

    Of all that a node has nothing else leaves it, whatever a spec asks for.
    """
    sends = method.sends(first)
    sent = select(first, sends)
    return tuple(without_frozen(sent)) if any(map(is_frozen, sent)) else sends


def send_prefixes(*prefixes: str) -> Callable[[Arrays], tuple[str, ...]]:
    """`sends` of a method that always sends the same."""
    return lambda broadcast: prefixes


class OneStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a method with one stage of training."""

    # A round; 0 = the spec's local_epochs (twice that equals the budget of a method with two
    # stages).
    epochs: Annotated[int, msgspec.Meta(ge=0)] = 0


def classification_loss(
    network: Network, tensors: Tensors, batch: Batch, encode: Encode
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the plain model, classifier on encoder."""
    loss = network.cross_entropy(
        network.linear(tensors, "classifier", encode(tensors, batch.images)), batch.labels
    )
    return loss, {CLASSIFICATION_LOSS.key: loss}


def plain_phase(training: Training, epochs: int = 0, loss: Loss = classification_loss) -> Phase:
    """Ordinary supervised training of encoder and classifier."""
    return Phase("train", (Step(WHOLE, loss),), epochs or training.local_epochs)


def init_shared_classifier(encoder: Arrays, shape: Shape, random: np.random.Generator) -> Arrays:
    """`init_server` of a method that shares its classifier."""
    return init_linear("classifier", shape.features, shape.classes, random)


def init_private_classifier(broadcast: Arrays, shape: Shape, random: np.random.Generator) -> Arrays:
    """`init_node` of a method whose nodes keep their classifiers."""
    return init_linear("classifier", shape.features, shape.classes, random)
