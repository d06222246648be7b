"""Timings that a head has measured, as rounds for an agent to learn from."""

from pathlib import Path

import numpy as np

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.policies.latency import Floats
from edge_node.extensions.vfl.policies.policy import SHORTEST
from edge_node.extensions.vfl.server.journal import history, newest_spec
from trainer.seeding import generator

_FEWEST = 20  # rounds to draw from


class Measured:
    """Each round's timings are those of some measured round:
    what sensors have in common stays, the order does not.
    """

    def __init__(self, table: Floats):
        """A table [R, 3, K] in seconds."""
        self._table = np.maximum(table, SHORTEST)
        self.sensors = table.shape[2]

    @property
    def ranges(self) -> Floats:
        """As measured."""
        return np.stack([self._table.min(0), self._table.max(0)])

    def sample(self, rounds: int, seed: int, episode: int) -> Floats:
        """Timings [T, 3, K]."""
        return self._table[
            generator(seed, "measured", episode).integers(len(self._table), size=rounds)
        ]


def read(state: Path) -> Measured:
    """The rounds of a head's state folder in which all sensors took part,
    and of which it knew how fast they compute.

    Raises:
        UsageError: there are too few.
    """
    spec = newest_spec(state)
    names = spec.sensors if spec else ()
    rounds = (
        (each.collection, each.communication, each.iteration)
        for each in history(state)
        if all(each.iterations)
    )
    rows = [
        [[part[name] for name in names] for part in parts]
        for parts in rounds
        if all(parts[2].values())
    ]
    if len(rows) < _FEWEST:
        raise UsageError(
            f"{state} has {len(rows)} rounds with all sensors, too few to learn from",
            f"let the federation run for {_FEWEST} rounds or more",
        )
    return Measured(np.array(rows))
