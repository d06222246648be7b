"""The one local training loop: runs a Phase. It owns batches, optimiser and random numbers."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from broker_config.errors import EdgeNodeError
from broker_config.messages import Preprocessing, Training
from trainer.data import LabelledImages
from trainer.methods.base import Batch, Metrics, Phase
from trainer.network import Network, Tree
from trainer.tree import pick, trainable, under

BETAS = (0.9, 0.999)
_EVALUATION_BATCH = 64


class Stopped(Exception):  # noqa: N818  (not an error: somebody asked for it)
    """Training was asked to stop between two batches."""


class TrainingSet(NamedTuple):
    """A node's images, ready for the network."""

    images: Tensor  # uint8 [n, 3, S, S]
    labels: Tensor  # int64 [n]
    mean: Tensor  # [3, 1, 1]
    std: Tensor

    @staticmethod
    def of(images: LabelledImages, preprocessing: Preprocessing) -> "TrainingSet":
        """From uint8 [n, S, S, 3] and the federation's preprocessing."""
        return TrainingSet(
            torch.from_numpy(np.ascontiguousarray(images.images)).permute(0, 3, 1, 2),
            torch.from_numpy(np.asarray(images.labels, np.int64)),
            torch.tensor(preprocessing.mean)[:, None, None],
            torch.tensor(preprocessing.std)[:, None, None],
        )

    def network_input(self, index: Tensor | slice, random: torch.Generator | None = None) -> Tensor:
        """Images [b, 3, S, S], augmented if `random` is given, normalised."""
        images: Tensor = self.images[index].float() / 255
        if random is not None:
            images = augment(images, random)
        return (images - self.mean) / self.std


def augment(images: Tensor, random: torch.Generator) -> Tensor:
    """One of the square's eight symmetries, contrast and brightness within 20 %, for each image [b, 3, S, S] in 0..1.

    A surface has no up or left; its lighting varies. Defects stay what they are.
    """
    count = len(images)
    mirror, flip, turn = torch.rand((3, count, 1, 1, 1), generator=random) < 0.5
    contrast, brightness = torch.rand((2, count, 1, 1, 1), generator=random) * 0.4 - 0.2
    images = torch.where(mirror, images.flip(3), images)
    images = torch.where(flip, images.flip(2), images)
    images = torch.where(turn, images.transpose(2, 3), images)
    mean = images.mean((1, 2, 3), keepdim=True)
    varied: Tensor = (images - mean) * (1 + contrast) + mean * (1 + brightness)
    return varied.clamp(0, 1)


def batches(count: int, batch_size: int, random: torch.Generator) -> list[Tensor]:
    """A random order of `count` images in batches of nearly equal size, none larger than `batch_size`.

    Equal sizes keep a batch of one from forming (it breaks BatchNorm's statistics) unless `count` itself is one.
    """
    order = torch.randperm(count, generator=random)
    return list(order.tensor_split(-(-count // batch_size)))


def run_phase(
    network: Network,
    phase: Phase,
    tree: Tree,
    moments: Tree,
    received: Tree,
    data: TrainingSet,
    training: Training,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Tree, Tree, Metrics]:
    """Train `tree` through one phase.

    Args:
        network: the structure of the trees.
        phase: what is trained, against which loss.
        tree: the node's tensors; left as they are.
        moments: Adam's state, names `{tensor}/{step|exp_avg|exp_avg_sq}`; left as they are.
        received: the round's broadcast, frozen.
        data: the node's training images.
        training: learning rate, batch size, augmentation, BatchNorm mode.
        seed: of order and augmentation.
        stop: asked between batches.

    Returns:
        The new tree, the new moments, and each metric's mean over the batches of the last epoch.

    Raises:
        Stopped: `stop` said so.
        EdgeNodeError: a loss is not finite.
    """
    random = torch.Generator().manual_seed(seed)
    prefixes = [prefix for step in phase.steps for prefix in step.trains]
    trained = [name for name in pick(tree, prefixes) if trainable(name)]
    moving = set(trained)
    tree = {name: value.clone().requires_grad_(name in moving) for name, value in tree.items()}
    reference = _Reference(network, received, data, cached=not training.augment) if phase.uses_reference else None
    optimiser = _optimiser(phase, tree, trained, moments, training)
    chosen = _choose(len(data.labels), phase.share, random)
    encode = _Encode(network, moving if training.batch_norm == "train" else set())
    metrics: Metrics = {}
    losses: list[float] = []
    steps = 0
    for _ in range(phase.epochs):
        sums: dict[str, list[float]] = defaultdict(list)
        for order in batches(len(chosen), training.batch_size, random):
            if stop():
                raise Stopped
            index = chosen[order]
            images = data.network_input(index, random if training.augment else None)
            features = reference.features(index, images) if reference else None
            batch = Batch(images, data.labels[index], features, received)
            _take_steps(network, phase, tree, batch, encode, optimiser, sums)
            steps += 1
        metrics = {name: float(np.mean(values)) for name, values in sums.items()}
        losses.append(next(iter(metrics.values())))
        if phase.settled is not None and phase.settled(tree, received, losses):
            break
    if isinstance(optimiser, torch.optim.Adam):
        moments = {
            **moments,
            **{f"{name}/{key}": value for name in trained for key, value in optimiser.state[tree[name]].items()},
        }
    return phase.after({name: value.detach() for name, value in tree.items()}, received, steps), moments, metrics


def _choose(count: int, share: float, random: torch.Generator) -> Tensor:
    """Positions of the images that a phase sees."""
    if share == 1:
        return torch.arange(count)
    return torch.randperm(count, generator=random)[: max(min(2, count), round(share * count))]


class _Encode:
    """Runs an encoder of the trained tree. BatchNorm is in training mode in those encoders that move, if in any."""

    def __init__(self, network: Network, moving: set[str]):
        self._network = network
        self._training = {name.rpartition("encoder.")[0] + "encoder" for name in moving if "encoder." in name}

    def __call__(self, tree: Tree, images: Tensor, prefix: str = "encoder") -> Tensor:
        return self._network.encode(tree, images, prefix=prefix, training=prefix in self._training)


def _take_steps(
    network: Network,
    phase: Phase,
    tree: Tree,
    batch: Batch,
    encode: _Encode,
    optimiser: torch.optim.Optimizer | None,
    sums: dict[str, list[float]],
) -> None:
    for step in phase.steps:
        moved = [value for value in pick(tree, step.trains).values() if value.requires_grad]
        with torch.set_grad_enabled(bool(moved)):
            loss, reported = step.loss(network, tree, batch, encode)
        if optimiser is not None and moved:
            optimiser.zero_grad(set_to_none=True)
            loss.backward(inputs=moved)  # type: ignore[no-untyped-call]
            optimiser.step()
            _clamp(phase, tree)
        for name, value in reported.items():
            figure = float(value.detach())
            if not math.isfinite(figure):
                raise EdgeNodeError(f"training has diverged: {name} is {figure}", "take a smaller learning_rate")
            sums[name].append(figure)


def _clamp(phase: Phase, tree: Tree) -> None:
    with torch.no_grad():
        for prefix, (low, high) in phase.bounds.items():
            for value in pick(tree, (prefix,)).values():
                value.clamp_(low, high)


class _Reference:
    """The received encoder's features. It is frozen for a round, so those of un-augmented images are computed once."""

    def __init__(self, network: Network, received: Tree, data: TrainingSet, cached: bool):
        self._network, self._received = network, received
        everything = slice(0, len(data.labels))
        self._cache = self._encode(data.network_input(everything)) if cached else None

    def features(self, index: Tensor, images: Tensor) -> Tensor:
        """Features [b, features] of the images at `index`, seen as `images`."""
        return self._encode(images) if self._cache is None else self._cache[index]

    def _encode(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self._network.encode(self._received, images)


def _optimiser(
    phase: Phase, tree: Tree, trained: list[str], moments: Tree, training: Training
) -> torch.optim.Optimizer | None:
    """Adam with the moments that it was left with, or the phase's SGD, which starts at rest; None to train nothing."""
    if not trained:
        return None
    by_rate: dict[float, list[Tensor]] = defaultdict(list)
    for name in trained:
        by_rate[_rate(phase, name, phase.sgd.rate if phase.sgd else training.learning_rate)].append(tree[name])
    groups = [{"params": tensors, "lr": rate} for rate, tensors in by_rate.items()]
    if phase.sgd is not None:
        return torch.optim.SGD(groups, momentum=phase.sgd.momentum, fused=True)
    optimiser = torch.optim.Adam(groups, betas=BETAS, fused=True)
    for name in trained:
        kept = {key: moments[f"{name}/{key}"].clone() for key in _MOMENTS if f"{name}/{key}" in moments}
        if kept:
            optimiser.state[tree[name]] = kept
    return optimiser


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def _rate(phase: Phase, name: str, default: float) -> float:
    return next((rate for prefix, rate in phase.rates.items() if under(name, prefix)), default)


def judge(network: Network, personal: Tree, data: TrainingSet) -> np.ndarray:
    """Logits [n, classes] of every image, by a personal model."""
    answers = []
    with torch.no_grad():
        for start in range(0, len(data.labels), _EVALUATION_BATCH):
            images = data.network_input(slice(start, start + _EVALUATION_BATCH))
            answers.append(network.judge(personal, images))
    return torch.cat(answers).numpy()
