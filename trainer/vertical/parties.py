"""The two kinds of party and what each does in a round (paper, Algorithm 1), without any network.

Tensors go in and come out; a party's model and nothing else changes. `simulate` and the processes of a real line
use these alike, so both compute the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from broker_config.vertical import Denoising, Recipe
from trainer.seeding import key_to_seed
from trainer.vertical.denoiser import Denoiser
from trainer.vertical.networks import HEAD, feature_model, head_model

State = Mapping[str, Tensor]
_PART = 4096  # samples that are embedded at once: bounds memory


class Representation(NamedTuple):
    """Phi (eq. 4): what the head sends to every sensor. It is not denoised anew during local iterations."""

    head: State
    embeddings: tuple[Tensor, ...]  # [N, D_k] of each sensor, denoised


class Sensor:
    """Sensor k: its feature model and its online gradient descent."""

    def __init__(self, index: int, name: str, network: str, shape: Sequence[int], recipe: Recipe, seed: int):
        self.index, self.name = index, name
        self.model = feature_model(network, shape, seed, name)
        self._recipe, self._seed = recipe, seed

    @torch.no_grad()
    def embed(self, samples: Tensor) -> Tensor:
        """h_k [N, D] of samples [N, *shape]."""
        return torch.cat([self.model(part) for part in torch.split(samples, _PART)])

    def learn(
        self, samples: Tensor, labels: Tensor, phi: Representation, iterations: int, round_: int
    ) -> tuple[float, int]:
        """E_{t,k} local iterations with the others' embeddings as received (eq. 5); return mean loss and steps."""

        def loss(rows: Tensor | slice) -> Tensor:
            parts = [each[rows] for each in phi.embeddings]
            parts[self.index] = self.model(samples[rows])
            return nn.functional.cross_entropy(_logits(phi.head, parts), labels[rows])

        return _descend(self.model, loss, len(samples), iterations, self._recipe, self._random(round_))

    def follow(self, samples: Tensor, gradient: Tensor, iterations: int, round_: int) -> tuple[float, int]:
        """As `learn` where only the head has labels: descend <g, h_k>, with g the loss's gradient at h_k as received.

        `gradient` [N, D] is of the sum over products divided by N, as `Head.gradients` gives it. The first full step is
        that of `learn` if the channel is clean; later ones take the loss to be linear in h_k. The loss returned is
        that of the linear function, whose level means nothing.
        """

        def loss(rows: Tensor | slice) -> Tensor:
            part = gradient[rows]
            linear: Tensor = (part * self.model(samples[rows])).sum()
            return linear * (len(gradient) / len(part))

        return _descend(self.model, loss, len(samples), iterations, self._recipe, self._random(round_))

    def _random(self, round_: int) -> torch.Generator:
        return torch.Generator().manual_seed(key_to_seed(self._seed, self.name, round_, "batches"))


class Head:
    """The server: denoiser and head model."""

    def __init__(self, sizes: Sequence[int], classes: int, denoising: Denoising, recipe: Recipe, seed: int):
        self.model = head_model(sizes, classes, seed)
        self.denoiser = Denoiser(denoising, sizes, seed)
        self._recipe, self._seed = recipe, seed

    def represent(self, received: Sequence[Tensor], second: Sequence[Tensor] | None = None) -> Representation:
        """Phi from noisy embeddings [N, D_k]; `second` is the other copy of each that the denoiser learns from."""
        if second is not None:
            self.denoiser.learn(received, second)
        head = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return Representation(head, tuple(self.denoiser(received)))

    def learn(self, phi: Representation, labels: Tensor, iterations: int, round_: int) -> tuple[float, int]:
        """E_{t,0} local iterations of the head; return mean loss and steps."""
        features = torch.cat(phi.embeddings, 1)

        def loss(rows: Tensor | slice) -> Tensor:
            return nn.functional.cross_entropy(self.model(features[rows]), labels[rows])

        random = torch.Generator().manual_seed(key_to_seed(self._seed, HEAD, round_, "batches"))
        return _descend(self.model, loss, len(features), iterations, self._recipe, random)

    @torch.no_grad()
    def predict(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [N, classes] of embeddings that are denoised, or need no denoising."""
        logits: Tensor = self.model(torch.cat(list(embeddings), 1))
        return logits

    @staticmethod
    def gradients(phi: Representation, labels: Tensor) -> tuple[Tensor, ...]:
        """Of the mean loss, by each sensor's embedding [N, D_k]: what sensors without labels need."""
        parts = [each.clone().requires_grad_() for each in phi.embeddings]
        return torch.autograd.grad(nn.functional.cross_entropy(_logits(phi.head, parts), labels), parts)


def _logits(head: State, embeddings: Sequence[Tensor]) -> Tensor:
    return nn.functional.linear(torch.cat(list(embeddings), 1), head["weight"], head["bias"])


def _descend(
    model: nn.Module,
    loss: Callable[[Tensor | slice], Tensor],
    samples: int,
    iterations: int,
    recipe: Recipe,
    random: torch.Generator,
) -> tuple[float, int]:
    """Plain gradient descent; an iteration is one pass over the samples."""
    parameters = list(model.parameters())
    total, steps = 0.0, 0
    for _ in range(iterations):
        for rows in _batches(samples, recipe.batch, random):
            value = loss(rows)
            gradients = torch.autograd.grad(value, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=recipe.eta)
            total, steps = total + value.item(), steps + 1
    return total / max(1, steps), steps


def _batches(samples: int, size: int, random: torch.Generator) -> Iterator[Tensor | slice]:
    if not size:
        yield slice(0, samples)
    else:
        yield from torch.split(torch.randperm(samples, generator=random), size)
