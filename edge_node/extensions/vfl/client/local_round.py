"""A sensor's part of one round: its embeddings, the head's reply, and training with it."""

from typing import NamedTuple

import torch
from torch import Tensor

from edge_node.extensions.vfl import tensor_frames
from edge_node.extensions.vfl.algorithm import Representation, Sensor
from edge_node.extensions.vfl.frames import Graded, Represented


class LocalRound(NamedTuple):
    """A round for which a sensor has sent its embeddings."""

    round: int
    samples: Tensor  # [N, columns, cycles]; zeros for what is missing
    missing: tuple[int, ...]  # rows
    sent: list[bytes]
    reply: tensor_frames.Reply

    def put(self, frame: Represented | Graded) -> bool:
        """Take in what the head sends back; whether it is whole now.

        ValueError says why it cannot be.
        """
        match self.reply, frame:
            case tensor_frames.RepresentationBuffer() as reply, Represented():
                reply.put(frame)
            case tensor_frames.GradientBuffer() as reply, Graded():
                reply.put(frame)
            case _:
                raise ValueError(f"a {type(frame).__name__} does not belong to this run")
        return self.reply.complete

    def train(self, sensor: Sensor) -> int:
        """Take the local iterations that the head has decided, and return how many.

        A sensor learns nothing from products that it has no sample of: zeros with a label would
        mislead it.
        """
        if len(self.missing) == len(self.samples):
            return 0
        match self.reply:
            case tensor_frames.RepresentationBuffer(whole=(phi, labels)) as reply:
                steps = reply.iterations[sensor.index]
                phi = Representation(phi.head, tuple(self._there(each) for each in phi.embeddings))
                sensor.train(self._there(self.samples), self._there(labels), phi, steps, self.round)
            case tensor_frames.GradientBuffer(
                whole=gradient, curvature=curvature, iterations=steps
            ):
                sensor.train_on_gradients(
                    self._there(self.samples), self._there(gradient), curvature, steps, self.round
                )
        return steps

    def _there(self, values: Tensor) -> Tensor:
        """Without the rows that are missing."""
        if not self.missing:
            return values
        there = torch.ones(len(values), dtype=torch.bool)
        there[list(self.missing)] = False
        return values[there]
