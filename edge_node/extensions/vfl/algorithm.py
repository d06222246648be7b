"""Computation of a sensor and of the head in a round (paper, Algorithm 1), without any network.

Tensors go in and come out; a party's model and nothing else changes. The simulation and the
processes of a real run use the same code, so both compute the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from broker_config.protocol.errors import EdgeNodeError
from edge_node.extensions.vfl.channel_noise import Array, Extent, measure_extent
from edge_node.extensions.vfl.denoiser import Denoiser
from edge_node.extensions.vfl.messages import Denoising, Recipe
from edge_node.extensions.vfl.networks import HEAD, build_feature_model, build_head_model
from trainer.seeding import key_to_seed

State = Mapping[str, Tensor]
Loss = Callable[[Tensor | slice], Tensor]  # of a round's rows, the mean over them
AGAINST_DIVERGING = (
    "start a new run with a smaller step (--eta), and look for readings that are far out of scale"
)
_PART = 4096  # samples that are embedded at once: bounds memory


class Representation(NamedTuple):
    """Phi (eq.

    4): what the head sends to every sensor. It is not denoised anew during local iterations.
    """

    head: State
    embeddings: tuple[Tensor, ...]  # [N, D_k] of each sensor, denoised


class Sensor:
    """Sensor k: its feature model and its online gradient descent."""

    def __init__(
        self,
        index: int,
        name: str,
        network: str,
        shape: Sequence[int],
        recipe: Recipe,
        seed: int,
        clip: float = 0.0,
        secret: bytes = b"",
    ):
        """`clip` is that of the spec's Privacy; `secret`, which it needs,
        is this sensor's own and never leaves it.
        """
        self.index = index
        self.name = name
        self.secret = secret
        self.model = build_feature_model(network, shape, seed, name, clip)
        self.sent: Array | Extent | None = None  # in its newest round, or the extent of that
        self._recipe = recipe
        self._seed = seed

    @property
    def extent(self) -> Extent | None:
        """Of what it sent in its newest round; it is measured for whoever asks,
        which is seldom done.
        """
        if isinstance(self.sent, np.ndarray):
            self.sent = measure_extent(self.sent)
        return self.sent

    @torch.no_grad()
    def embed(self, samples: Tensor) -> Tensor:
        """h_k [N, D] of samples [N, *shape]; EdgeNodeError if the model has diverged."""
        embedding = torch.cat([self.model(part) for part in torch.split(samples, _PART)])
        if not embedding.isfinite().all():
            raise diverged_error(self.name)
        return embedding

    def train(
        self, samples: Tensor, labels: Tensor, phi: Representation, iterations: int, round_: int
    ) -> tuple[float, int]:
        """E_{t,k} local iterations with the others' embeddings as received (eq.

        5); return mean loss and steps.
        """

        def loss(rows: Tensor | slice) -> Tensor:
            parts = [each[rows] for each in phi.embeddings]
            parts[self.index] = self.model(samples[rows])
            return nn.functional.cross_entropy(_logits(phi.head, parts), labels[rows])

        return self._descend(loss, samples, iterations, round_)

    def train_on_gradients(
        self, samples: Tensor, gradient: Tensor, curvature: float, iterations: int, round_: int
    ) -> tuple[float, int]:
        """As `learn` where only the head has labels: descend a quadratic that lies above the loss.

        With g a product's gradient (`Head.gradients`), L the curvature and h_0 the embedding as it
        is now, that is <g, h - h_0> + L/2 |h - h_0|^2: what the loss grows by, at most (quadratic
        majoriser; Boehning and Lindsay 1988). If the channel is clean the first step over all
        samples is that of `learn`, and as long as steps lower the quadratic the loss stays below
        where it was. The loss returned is that of the quadratic: below zero.
        """
        start = self.embed(samples)

        def loss(rows: Tensor | slice) -> Tensor:
            moved = self.model(samples[rows]) - start[rows]
            quadratic: Tensor = ((gradient[rows] + curvature / 2 * moved) * moved).sum() / len(
                moved
            )
            return quadratic

        return self._descend(loss, samples, iterations, round_)

    def _descend(
        self, loss: Loss, samples: Tensor, iterations: int, round_: int
    ) -> tuple[float, int]:
        random = _random(self._seed, self.name, round_)
        return _descend(self.name, self.model, loss, len(samples), iterations, self._recipe, random)


class Head:
    """The server: denoiser and head model."""

    def __init__(
        self, sizes: Sequence[int], classes: int, denoising: Denoising, recipe: Recipe, seed: int
    ):
        self.model = build_head_model(sizes, classes, seed)
        self.denoiser = Denoiser(denoising, sizes, seed)
        self._recipe = recipe
        self._seed = seed

    def represent(
        self, received: Sequence[Tensor], second: Sequence[Tensor] | None = None
    ) -> Representation:
        """Phi from noisy embeddings [N, D_k]; `second` is the other copy of each that the
        denoiser learns from.

        Raises:
            EdgeNodeError: the head's model has diverged.
        """
        if second is not None:
            self.denoiser.train(received, second)
        head = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        if not all(value.isfinite().all() for value in head.values()):
            raise diverged_error("the head")
        return Representation(head, tuple(self.denoiser(received)))

    def train(
        self, phi: Representation, labels: Tensor, iterations: int, round_: int
    ) -> tuple[float, int]:
        """E_{t,0} local iterations of the head; return mean loss and steps."""
        features = torch.cat(phi.embeddings, 1)

        def loss(rows: Tensor | slice) -> Tensor:
            return nn.functional.cross_entropy(self.model(features[rows]), labels[rows])

        random = _random(self._seed, HEAD, round_)
        return _descend(
            "the head", self.model, loss, len(features), iterations, self._recipe, random
        )

    @torch.no_grad()
    def logits(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [N, classes] of embeddings that are denoised, or need no denoising."""
        logits: Tensor = self.model(torch.cat(list(embeddings), 1))
        return logits

    @staticmethod
    def gradients(phi: Representation, labels: Tensor) -> tuple[Tensor, ...]:
        """Of each product's loss, by each sensor's embedding [N, D_k]:
        what sensors without labels need.
        """
        parts = [each.clone().requires_grad_() for each in phi.embeddings]
        loss = nn.functional.cross_entropy(_logits(phi.head, parts), labels, reduction="sum")
        return torch.autograd.grad(loss, parts)

    @staticmethod
    def curvatures(phi: Representation) -> tuple[float, ...]:
        """How strongly a product's loss is curved along each sensor's embedding, at most.

        The loss's second derivative by the logits is at most 1/2, and 0 along what is common to all
        classes, so that by an embedding it is at most half the squared spectral norm of its columns
        of the head's weight, centred.
        """
        centred = phi.head["weight"] - phi.head["weight"].mean(0)
        parts = torch.split(centred, [each.shape[1] for each in phi.embeddings], dim=1)
        return tuple(torch.linalg.matrix_norm(part, 2).square().item() / 2 for part in parts)


def _logits(head: State, embeddings: Sequence[Tensor]) -> Tensor:
    return nn.functional.linear(torch.cat(list(embeddings), 1), head["weight"], head["bias"])


def _descend(
    party: str,
    model: nn.Module,
    loss: Loss,
    samples: int,
    iterations: int,
    recipe: Recipe,
    random: torch.Generator,
) -> tuple[float, int]:
    """Plain gradient descent; an iteration is one pass over the samples."""
    parameters = list(model.parameters())
    total = 0.0
    steps = 0
    for _ in range(iterations):
        for rows in split_batches(samples, recipe.batches, random):
            value = loss(rows)
            gradients = torch.autograd.grad(value, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=recipe.eta)
            total = total + value.item()
            steps = steps + 1
            if not isfinite(total):
                raise diverged_error(party)
    return total / max(1, steps), steps


def split_batches(samples: int, parts: int, random: torch.Generator) -> Iterator[Tensor | slice]:
    """The rows of each step of an iteration: so many parts of nearly the same size,
    in random order; or all.
    """
    if parts == 1:
        yield slice(0, samples)
    else:
        yield from torch.tensor_split(
            torch.randperm(samples, generator=random), min(parts, samples)
        )


def _random(seed: int, party: str, round_: int) -> torch.Generator:
    return torch.Generator().manual_seed(key_to_seed(seed, party, round_, "batches"))


def diverged_error(party: str) -> EdgeNodeError:
    """The error that ends a sensor or head whose numbers are not finite."""
    return EdgeNodeError(
        f"the training of {party} has diverged: its numbers are not finite any more",
        AGAINST_DIVERGING,
    )
