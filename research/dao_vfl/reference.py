"""References of a vertical federation: the same network as one autograd graph,
where all data are in one place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edge_node.extensions.vfl.algorithm import split_batches
from edge_node.extensions.vfl.messages import VflSpec, Window
from edge_node.extensions.vfl.networks import build_feature_model, build_head_model, embedding_size
from edge_node.extensions.vfl.simulation import SimulatedRound, Stream
from trainer.seeding import key_to_seed

_PART = 4096  # samples at once where nothing is learnt
_STEPS, _BATCH, _RATE = 3000, 256, 1e-3  # of the fixed model, with Adam


class Whole(nn.Module):
    """All feature models and the head; initial values are those of the federation with the same
    seed.
    """

    def __init__(self, spec: VflSpec, shapes: Sequence[Sequence[int]]):
        super().__init__()
        self.parts = nn.ModuleList(
            build_feature_model(spec.network, shape, spec.seed, name)
            for name, shape in zip(spec.sensors, shapes, strict=True)
        )
        sizes = [embedding_size(spec.network, shape) for shape in shapes]
        self.head = build_head_model(sizes, len(spec.classes), spec.seed)

    def forward(self, samples: Sequence[Tensor]) -> Tensor:
        """Logits [N, classes]."""
        embeddings = [part(each) for part, each in zip(self.parts, samples, strict=True)]
        logits: Tensor = self.head(torch.cat(embeddings, 1))
        return logits

    @torch.no_grad()
    def predict(self, samples: Sequence[Tensor]) -> Tensor:
        """Logits [N, classes] of any number of samples."""
        parts = zip(*(torch.split(each, _PART) for each in samples), strict=True)
        return torch.cat([self(part) for part in parts])


class Central:
    """Centralised online gradient descent: a federation's sets, batches and steps,
    without its channel.
    """

    def __init__(self, spec: VflSpec, stream: Stream):
        self.spec, self.stream = spec, stream
        self.model = Whole(spec, [each.shape[1:] for each in stream.samples])
        self._optimiser = torch.optim.SGD(self.model.parameters(), spec.recipe.eta)
        self.round = 0

    def step(self, iterations: Sequence[int]) -> SimulatedRound:
        """Play the next round, with as many passes over its set as the busiest sensor takes."""
        self.round += 1
        first, end = self.spec.window.span(self.round)
        rows, samples = torch.arange(first, end), [each[first:end] for each in self.stream.samples]
        loss = nn.functional.cross_entropy(self.predict(samples), self.stream.labels[rows]).item()
        random = torch.Generator().manual_seed(
            key_to_seed(self.spec.seed, "central", self.round, "batches")
        )
        for _ in range(max(iterations)):
            for batch in split_batches(len(rows), self.spec.recipe.batches, random):
                _descend(self.model, self._optimiser, self.stream, rows[batch])
        return SimulatedRound(self.round, len(rows), tuple(iterations), loss)

    def predict(self, samples: Sequence[Tensor]) -> Tensor:
        """Logits [N, classes]."""
        return self.model.predict(samples)


class Fixed:
    """A model that saw all products beforehand and does not learn any more:
    a proxy of the best fixed one.

    It is trained on the sum of all rounds' losses: a product counts as its part in the mean of
    every set that has it.
    """

    def __init__(self, spec: VflSpec, stream: Stream, rounds: int):
        self._window, self.round = spec.window, 0
        self.model = Whole(spec, [each.shape[1:] for each in stream.samples])
        self._learn(stream, _shares(spec.window, rounds), spec.seed)
        logits = self.model.predict(stream.samples)
        # of each product
        self._losses = nn.functional.cross_entropy(logits, stream.labels, reduction="none")

    def step(self, iterations: Sequence[int]) -> SimulatedRound:
        """The loss over the next round's set."""
        self.round += 1
        losses = self._losses[slice(*self._window.span(self.round))]
        return SimulatedRound(self.round, len(losses), tuple(iterations), losses.mean().item())

    def predict(self, samples: Sequence[Tensor]) -> Tensor:
        """Logits [N, classes]."""
        return self.model.predict(samples)

    def _learn(self, stream: Stream, shares: Tensor, seed: int) -> None:
        optimiser = torch.optim.Adam(self.model.parameters(), _RATE)
        random = torch.Generator().manual_seed(key_to_seed(seed, "offline", "batches"))
        drawn = torch.multinomial(shares, _STEPS * _BATCH, replacement=True, generator=random)
        for rows in torch.split(drawn, _BATCH):
            _descend(self.model, optimiser, stream, rows)


def _shares(window: Window, rounds: int) -> Tensor:
    """How much each product up to the last round counts, in all."""
    shares = torch.zeros(window.span(rounds)[1], dtype=torch.float64)
    for round_ in range(1, rounds + 1):
        first, end = window.span(round_)
        shares[first:end] += 1 / (end - first)
    return shares


def _descend(model: Whole, optimiser: torch.optim.Optimizer, stream: Stream, rows: Tensor) -> None:
    optimiser.zero_grad()
    loss = nn.functional.cross_entropy(
        model([each[rows] for each in stream.samples]), stream.labels[rows]
    )
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
