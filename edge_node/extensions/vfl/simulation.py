"""Simulation of a vertical federation in one process: the same sensors and head,
without a broker.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edge_node.extensions.vfl.algorithm import Head, Sensor
from edge_node.extensions.vfl.channel_noise import measure_extent, transmit
from edge_node.extensions.vfl.denoiser import sends_pairs
from edge_node.extensions.vfl.messages import Channel, VflSpec
from edge_node.extensions.vfl.networks import embedding_size
from edge_node.extensions.vfl.privacy import protect
from trainer.seeding import generator, key_to_seed

Decide = Callable[[int], Sequence[int]]  # round -> E_{t,k} of each sensor


class Stream(NamedTuple):
    """Products in the order of their arrival."""

    samples: tuple[Tensor, ...]  # of each sensor, float32 [P, *shape]
    labels: Tensor  # int64 [P]


class SimulatedRound(NamedTuple):
    """Outcome of a round."""

    round: int
    products: int  # in its set
    iterations: tuple[int, ...]  # E_{t,k}
    loss: float  # F_t at Theta^{t,0} as the head sees it: denoised embeddings


class Simulation:
    """Sensors, head and the products that they see; `step` plays one round (paper, Algorithm 1)."""

    def __init__(self, spec: VflSpec, stream: Stream):
        self.spec = spec
        self.stream = stream
        shapes = [tuple(each.shape[1:]) for each in stream.samples]
        self.sensors = [
            Sensor(
                index,
                name,
                spec.network,
                shape,
                spec.recipe,
                spec.seed,
                spec.privacy.clip,
                _secret(spec.seed, name),
            )
            for index, (name, shape) in enumerate(zip(spec.sensors, shapes, strict=True))
        ]
        sizes = [embedding_size(spec.network, shape) for shape in shapes]
        self.head = Head(sizes, len(spec.classes), spec.denoising, spec.recipe, spec.seed)
        self.round = 0

    def step(self, iterations: Sequence[int]) -> SimulatedRound:
        """Play the next round, in which the sensors take so many local iterations."""
        self.round += 1
        spec = self.spec
        round_ = self.round
        rows = slice(*spec.window.span(round_))
        samples = [each[rows] for each in self.stream.samples]
        labels = self.stream.labels[rows]
        sent = [
            release(spec, sensor, part, round_)
            for sensor, part in zip(self.sensors, samples, strict=True)
        ]
        second = [each.second for each in sent if each.second is not None]
        phi = self.head.represent([each.received for each in sent], second or None)
        loss = torch.nn.functional.cross_entropy(self.head.logits(phi.embeddings), labels).item()
        if spec.labels == "server":
            grades = zip(self.head.gradients(phi, labels), self.head.curvatures(phi), strict=True)
            for sensor, part, steps, grade in zip(
                self.sensors, samples, iterations, grades, strict=True
            ):
                sensor.train_on_gradients(part, *grade, steps, round_)
        else:
            for sensor, part, steps in zip(self.sensors, samples, iterations, strict=True):
                sensor.train(part, labels, phi, steps, round_)
        self.head.train(phi, labels, spec.steps_of_head(iterations), round_)
        return SimulatedRound(round_, len(labels), tuple(iterations), loss)

    def predict(self, samples: Sequence[Tensor], key: str = "predict") -> Tensor:
        """Logits [N, classes] of other products, whose embeddings go the same way:
        protection, channel, denoiser, head.

        Noise is drawn by (seed, sensor, round, key).
        """
        received = []
        for sensor, part in zip(self.sensors, samples, strict=True):
            random = generator(self.spec.seed, sensor.name, self.round, key)
            safe = protect(self.spec.privacy, sensor.embed(part).numpy(), sensor.secret)
            received.append(
                torch.from_numpy(
                    transmit(self.spec.channel, safe, random, sensor.extent or measure_extent(safe))
                )
            )
        return self.head.logits(self.head.denoiser(received))


class Release(NamedTuple):
    """Embeddings that leave a sensor in a round, as the channel delivers them."""

    received: Tensor  # [N, D_k]
    second: Tensor | None  # while the denoiser learns


def release(spec: VflSpec, sensor: Sensor, samples: Tensor, round_: int) -> Release:
    """Embed a round's samples; the channel's noise is drawn by (seed, sensor, round),
    protection by the secret.
    """
    embedding = sensor.embed(samples)
    copies = [protect(spec.privacy, embedding.numpy(), sensor.secret)]
    pairs = sends_pairs(spec.denoising, round_)
    clean = spec.denoising.target == "clean"
    if pairs and not clean:
        copies.append(protect(spec.privacy, embedding.numpy(), sensor.secret, copy=1))
    sensor.sent = copies[0]
    if spec.channel != Channel():
        random = generator(spec.seed, sensor.name, round_, "channel")
        sensor.sent = measure = measure_extent(copies[0])
        copies = [transmit(spec.channel, each, random, measure) for each in copies]
    received, *second = map(torch.from_numpy, copies)
    if pairs and clean:
        second = [embedding]
    second_or_none = second[0] if second else None
    return Release(received, second_or_none)


def _secret(seed: int, sensor: str) -> bytes:
    """Here it is no secret, but the same in every run."""
    return b"%016d" % key_to_seed(seed, sensor, "secret")


def simulate(simulation: Simulation, rounds: int, decide: Decide) -> Iterator[SimulatedRound]:
    """So many rounds, as they are played."""
    for _ in range(rounds):
        yield simulation.step(decide(simulation.round + 1))
