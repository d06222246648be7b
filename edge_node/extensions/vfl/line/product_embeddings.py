"""Embeddings collected by product until a prediction is due: some sensors are late,
gone or lying.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from edge_node.extensions.vfl.line.party_bundle import Array, EmbeddingSource

Answer = Literal["partial", "final"]
_LARGEST = 1e6  # of an embedding: beyond it, one sensor's lie would be a sure prediction


class SensorEmbedding(NamedTuple):
    """One product's embedding, of one sensor."""

    embedding: Array  # [D_k]
    round: int  # of the model that made it
    at: float  # when it came, seconds


class DuePrediction(NamedTuple):
    """A prediction that is to be made."""

    product: str
    answer: Answer  # final: nothing about this product comes after it
    parts: dict[str, SensorEmbedding]  # by the sensors that have reported


Rejection = Literal[
    "no sensor of this VFL run",
    "of the wrong length",
    "not finite",
    "far too large",
    "late",
    "there already",
]


class _Open:
    """A product of which something is lacking."""

    def __init__(self, first: str):
        self.first = first  # the sensor that reported first
        self.parts: dict[str, SensorEmbedding] = {}


class EmbeddingCollector:
    """Collects embeddings by product. Time comes in from outside: this waits for nothing.

    A product is open from its first embedding until it has all, or `deadline` seconds later; then
    it has its final prediction, and what comes afterwards is too late. Memory is bounded: of K
    sensors each may open at most `most` / K products at a time; one that opens more closes its own
    oldest, so a sensor gone wild harms no other's.
    """

    def __init__(
        self,
        sensors: tuple[EmbeddingSource, ...],
        deadline: float,
        most: int = 4096,
        closed: Mapping[str, Iterable[str]] = {},
    ):
        """`closed` is what another of these gave at its end:
        what has had its final prediction gets no other.
        """
        self._sizes = {each.name: each.size for each in sensors}
        self._deadline = deadline
        self._most = max(1, most // len(sensors))
        self._open: OrderedDict[str, _Open] = OrderedDict()  # in order of their first embeddings
        # by whom opened
        self._begun: dict[str, OrderedDict[str, None]] = {
            name: OrderedDict() for name in self._sizes
        }
        self._closed = OrderedDict((product, frozenset(had)) for product, had in closed.items())
        self._fresh: dict[str, None] = {}  # open products that have something new
        self._due: list[DuePrediction] = []

    def add(self, sensor: str, product: str, part: SensorEmbedding) -> Rejection | None:
        """Take an embedding; return why not if it is rejected."""
        if reason := self._fault(sensor, product, part.embedding):
            return reason
        if product not in self._open:
            self._make_room(sensor)
            self._open[product] = _Open(sensor)
            self._begun[sensor][product] = None
        found = self._open[product]
        found.parts[sensor] = part
        self._fresh[product] = None
        if len(found.parts) == len(self._sizes):
            self._close(product)
        return None

    def take_due(self, now: float) -> list[DuePrediction]:
        """The predictions to be made by now: final ones,
        and a partial one of each product that has something new.
        """
        while (
            self._open
            and (oldest := next(iter(self._open)))
            and now >= self._ends(self._open[oldest])
        ):
            self._close(oldest)
        partial = [
            DuePrediction(product, "partial", dict(self._open[product].parts))
            for product in self._fresh
        ]
        found = [*self._due, *partial]
        self._due = []
        self._fresh = {}
        return found

    def next_deadline(self) -> float | None:
        """When the deadline of the oldest open product passes; None if nothing is open."""
        return self._ends(next(iter(self._open.values()))) if self._open else None

    def close_all(self) -> list[DuePrediction]:
        """Close all that is open: no more will come."""
        for product in list(self._open):
            self._close(product)
        return self.take_due(0)

    @property
    def closed(self) -> dict[str, tuple[str, ...]]:
        """The newest products that had their final prediction,
        and whose embeddings each of them had.
        """
        return {product: tuple(sorted(had)) for product, had in self._closed.items()}

    def _fault(self, sensor: str, product: str, embedding: Array) -> Rejection | None:
        if sensor not in self._sizes:
            return "no sensor of this VFL run"
        if embedding.shape != (self._sizes[sensor],):
            return "of the wrong length"
        if not np.isfinite(embedding).all():
            return "not finite"
        if np.abs(embedding).max() > _LARGEST:
            return "far too large"
        if product in self._closed:
            return "there already" if sensor in self._closed[product] else "late"
        if product in self._open and sensor in self._open[product].parts:
            return "there already"
        return None

    def _make_room(self, sensor: str) -> None:
        if len(begun := self._begun[sensor]) >= self._most:
            self._close(next(iter(begun)))

    def _close(self, product: str) -> None:
        found = self._open.pop(product)
        del self._begun[found.first][product]
        self._fresh.pop(product, None)
        self._due.append(DuePrediction(product, "final", found.parts))
        self._closed[product] = frozenset(found.parts)
        if len(self._closed) > 2 * self._most * len(self._sizes):
            self._closed.popitem(last=False)

    def _ends(self, found: _Open) -> float:
        return next(iter(found.parts.values())).at + self._deadline
