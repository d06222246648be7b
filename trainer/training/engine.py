"""The one local training loop: runs a Phase. It owns batches, optimiser and random numbers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Training
from trainer.data.training_set import Augmentation, TrainingSet
from trainer.methods.base import Batch, Loss, Metrics, Phase, Sgd
from trainer.models.named_tensors import is_below, is_trainable, select
from trainer.models.network import Network, Tensors
from trainer.progress.long_work import Loop, Stopped
from trainer.training.optimiser import Optimiser
from trainer.training.private_gradients import PrivateGradients

# as He et al. (2016) and Peng et al. (2022) have it
SGD_MOMENTUM = 0.9
SGD_WEIGHT_DECAY = 1e-4


class DivergedError(EdgeNodeError):
    """A loss is no longer finite."""


def draw_batches(count: int, batch_size: int, random: torch.Generator) -> list[Tensor]:
    """A random order of `count` images in batches of nearly equal size,
    none larger than `batch_size`.

    Equal sizes keep a batch of one from forming (it breaks BatchNorm's statistics) unless `count`
    itself is one.
    """
    order = torch.randperm(count, generator=random)
    return list(order.tensor_split(-(-count // batch_size)))


def run_phase(
    network: Network,
    phase: Phase,
    tensors: Tensors,
    moments: Tensors,
    received: Tensors,
    data: TrainingSet,
    training: Training,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
    private: PrivateGradients | None = None,
) -> tuple[Tensors, Tensors, Metrics]:
    """Train `tensors` through one phase.

    Args:
        network: the structure that `tensors` belong to.
        phase: what is trained, against which loss.
        tensors: the node's tensors; not modified.
        moments: Adam's state, named `{tensor}/{step|exp_avg|exp_avg_sq}`; not modified.
        received: the round's broadcast, frozen.
        data: the node's training images.
        training: learning rate, batch size, augmentation, BatchNorm mode.
        seed: for order and augmentation.
        stop: called between batches.
        private: makes the gradients of a private federation, where each step sees all images.

    Returns:
        The new tensors, the new moments, and each metric's mean over the batches of the last epoch.

    Raises:
        Stopped: `stop` returned true.
        DivergedError: a loss is not finite.
    """
    tensors, moments, steps, metrics = descend(
        network, phase, tensors, moments, received, data, training, [seed], stop, private
    )
    return (
        phase.after(tensors, received, steps),
        moments,
        {name: float(value) for name, value in metrics.items()},
    )


def descend(
    network: Network,
    phase: Phase,
    tensors: Tensors,
    moments: Tensors,
    received: Tensors,
    data: TrainingSet,
    training: Training,
    seeds: Sequence[int],
    stop: Callable[[], bool] = lambda: False,
    private: PrivateGradients | None = None,
) -> tuple[Tensors, Tensors, int, dict[str, np.ndarray]]:
    """The steps of `run_phase`, for one node or, unless they are `private`, for several at once.

    With several seeds, `tensors` and `moments` are stacked [nodes, ...] (but for Adam's counts of
    steps), `data` holds equally many images of each node, one node's after another's, and the
    metrics are arrays [nodes].

    Returns:
        The new tensors and moments, the number of steps, and the metrics.
    """
    randoms = [torch.Generator().manual_seed(seed) for seed in seeds]
    prefixes = list(chain.from_iterable(step.trains for step in phase.steps))
    trained = [name for name in select(tensors, prefixes) if is_trainable(name)]
    moving = set(trained)
    tensors = {
        name: value.clone().requires_grad_(name in moving) for name, value in tensors.items()
    }
    reference = (
        _Reference(network, received, data, cached=not training.augment)
        if phase.uses_reference
        else None
    )
    optimiser = _optimiser(phase, tensors, trained, moments, training)
    count = len(data.labels) // len(seeds)
    chosen = [
        node * count + _choose(count, phase.share, random) for node, random in enumerate(randoms)
    ]
    one_by_one = len(seeds) == 1 and private is None
    applied = network if one_by_one else network.mapped()
    moved = moving if training.batch_norm == "train" else ()
    encode = _Encode(applied, moved)
    metrics: dict[str, np.ndarray] = {}
    losses: list[float] = []
    steps = 0
    loop: Loop | None = None
    for _ in range(phase.epochs):
        sums: dict[str, list[Tensor]] = defaultdict(list)
        orders = []
        for own, own_random in zip(chosen, randoms, strict=True):
            batch_size = training.batch_size if private is None else len(own)
            orders.append(draw_batches(len(own), batch_size, own_random))
        for order in zip(*orders, strict=True):
            if loop is None:
                loop = Loop("training", phase.epochs * len(orders[0]))
            loop.advance()
            if stop():
                raise Stopped
            index = torch.cat([own[places] for own, places in zip(chosen, order, strict=True)])
            augmentation = (
                _draw([len(places) for places in order], randoms) if training.augment else None
            )
            index = index.to(data.labels.device)
            random = randoms[0] if phase.draws else None
            read = partial(_read, network, data, received, reference, random, index, augmentation)
            _take_steps(
                network,
                phase,
                tensors,
                len(index),
                read,
                encode,
                optimiser,
                sums,
                len(seeds),
                private,
            )
            steps += 1
        metrics = {name: _mean(name, values) for name, values in sums.items()}
        if phase.is_settled is not None:
            losses.append(float(next(iter(metrics.values()))))
            if phase.is_settled(tensors, received, losses):
                break
    moments = {**moments, **optimiser.moments}
    return {name: value.detach() for name, value in tensors.items()}, moments, steps, metrics


def _read(
    network: Network,
    data: TrainingSet,
    received: Tensors,
    reference: "_Reference | None",
    random: torch.Generator | None,
    index: Tensor,
    augmentation: Augmentation | None,
    part: slice = slice(None),
) -> Batch:
    """The images at `index`, or those of them at `part`, as losses see them."""
    if augmentation is not None:
        augmentation = Augmentation(*(each[:, part] for each in augmentation))
    index = index[part]
    images = data.encoder_input(network, received, index, augmentation)
    features = reference.features(index, images) if reference else None
    return Batch(images, data.labels[index], features, received, random)


def _draw(counts: Sequence[int], randoms: Sequence[torch.Generator]) -> Augmentation:
    """Augmentation of as many images of each node, each with its own random numbers."""
    drawn = [
        Augmentation.draw(count, random) for count, random in zip(counts, randoms, strict=True)
    ]
    return Augmentation(*(torch.cat(parts, 1) for parts in zip(*drawn, strict=True)))


def _mean(name: str, values: Sequence[Tensor]) -> np.ndarray:
    """The mean over batches. DivergedError if a value is not finite."""
    figures = torch.stack(list(values)).double().cpu().numpy()
    if not np.isfinite(figures).all():
        wrong = figures[~np.isfinite(figures)].flat[0]
        raise DivergedError(
            f"training has diverged: {name} is {wrong}", "take a smaller learning_rate"
        )
    return np.asarray(figures.mean(0))


def _choose(count: int, share: float, random: torch.Generator) -> Tensor:
    """Positions of the images that a phase trains on."""
    if share == 1:
        return torch.arange(count)
    return torch.randperm(count, generator=random)[: max(min(2, count), round(share * count))]


class _Encode:
    """Runs an encoder of the trained tensors; BatchNorm is in training mode in those that are
    trained, if any.
    """

    def __init__(self, network: Network, moving: Iterable[str]):
        self._network = network
        self._training = {
            name.rpartition("encoder.")[0] + "encoder" for name in moving if "encoder." in name
        }

    def __call__(self, tensors: Tensors, images: Tensor, prefix: str = "encoder") -> Tensor:
        return self._network.encode(
            tensors, images, prefix=prefix, training=prefix in self._training
        )


def _take_steps(
    network: Network,
    phase: Phase,
    tensors: Tensors,
    count: int,
    read: Callable[..., Batch],
    encode: _Encode,
    optimiser: Optimiser,
    sums: dict[str, list[Tensor]],
    nodes: int,
    private: PrivateGradients | None,
) -> None:
    batch = read() if private is None else None
    for step in phase.steps:
        moved = {
            name: value
            for name, value in select(tensors, step.trains).items()
            if value.requires_grad
        }
        optimiser.zero_grad()
        if private is not None:
            gradients, reported = private.compute(
                step.loss, network, tensors, moved, encode, count, read
            )
            for name, value in moved.items():
                value.grad = gradients[name]
        else:
            assert batch is not None
            with torch.set_grad_enabled(bool(moved)):
                loss, reported = _compute_loss(step.loss, network, tensors, batch, encode, nodes)
            if moved:
                loss.backward(inputs=[*moved.values()])  # type: ignore[no-untyped-call]
        if moved:
            optimiser.step()
            _clamp(phase, tensors)
        for name, value in reported.items():
            sums[name].append(value.detach())


def _compute_loss(
    loss: Loss, network: Network, tensors: Tensors, batch: Batch, encode: _Encode, nodes: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss and its metrics.

    Losses of several nodes are summed: each moves only its own slice of the tensors.
    """
    if nodes == 1:
        return loss(network, tensors, batch, encode)

    def one(
        tensors: Tensors, images: Tensor, labels: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(network, tensors, Batch(images, labels, reference, batch.received), encode)

    parts: list[Any] = []
    for part in batch[:3]:
        by_node = None if part is None else part.view(nodes, -1, *part.shape[1:])
        parts.append(by_node)
    axes = []
    for tensor in (tensors, *parts):
        axis = None if tensor is None else 0
        axes.append(axis)
    losses, reported = torch.func.vmap(one, tuple(axes))(tensors, *parts)
    return losses.sum(), reported


def _clamp(phase: Phase, tensors: Tensors) -> None:
    with torch.no_grad():
        for prefix, (low, high) in phase.bounds.items():
            for value in select(tensors, (prefix,)).values():
                value.clamp_(low, high)


class _Reference:
    """Features of the received encoder.

    It is frozen for a round, so those of unaugmented images are computed once.
    """

    def __init__(self, network: Network, received: Tensors, data: TrainingSet, cached: bool):
        self._network = network
        self._received = received
        self._cache = (
            self._encode(data.encoder_input(network, received, slice(None))) if cached else None
        )

    def features(self, index: Tensor, images: Tensor) -> Tensor:
        """Features [b, features] of the images at `index`, augmented to `images`."""
        return self._encode(images) if self._cache is None else self._cache[index]

    def _encode(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self._network.encode(self._received, images)


def _optimiser(
    phase: Phase, tensors: Tensors, trained: list[str], moments: Tensors, training: Training
) -> Optimiser:
    sgd = phase.sgd
    if sgd is None and training.optimizer == "sgd":
        sgd = Sgd(training.learning_rate, SGD_MOMENTUM, SGD_WEIGHT_DECAY)
    rates = {}
    for name in trained:
        default = sgd.rate if sgd else training.learning_rate
        rates[name] = _rate(phase, name, default)
    return Optimiser({name: tensors[name] for name in trained}, rates, moments, sgd)


def _rate(phase: Phase, name: str, default: float) -> float:
    return next((rate for prefix, rate in phase.rates.items() if is_below(name, prefix)), default)


def predict(network: Network, personal: Tensors, data: TrainingSet) -> np.ndarray:
    """Logits [n, classes] of every image, by a personal model."""
    return data.in_batches(network.logits, network, personal)
