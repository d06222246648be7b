"""State of the head's open round: what has arrived of it. Pure: no broker, clock or disk."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from broker_config.protocol.errors import PeerError
from edge_node.extensions.vfl.algorithm import AGAINST_DIVERGING
from edge_node.extensions.vfl.frames import Embeddings
from edge_node.extensions.vfl.tensor_frames import OutOfScaleError, RowBuffer


class ReportedTimes(NamedTuple):
    """Times that a sensor reports of its round, seconds."""

    collection: float
    embedding: float
    iteration: float

    def clipped(self, latency: float, iteration: float) -> "ReportedTimes":
        """As far as the head's own clock bears it out:
        a part of what it took takes no longer than the whole.
        """
        collection = min(self.collection, latency)
        return ReportedTimes(
            collection, min(self.embedding, latency - collection), min(self.iteration, iteration)
        )


class SensorPart(NamedTuple):
    """A sensor's whole part of a round."""

    received: Tensor  # [N, D_k]
    second: Tensor | None  # while the denoiser learns
    missing: frozenset[int]  # rows that stand for products that it has no sample of
    costs: ReportedTimes


class OpenRound:
    """A round whose embeddings are arriving."""

    def __init__(
        self,
        run: str,
        attempt: int,
        round_: int,
        count: int,
        sizes: Mapping[str, int],
        *,
        pairs: bool,  # whether there is a second copy of each
        gaps: bool,  # whether a sensor may lack products
    ):
        self.run = run
        self.attempt = attempt
        self.round = round_
        self.arrived: dict[str, SensorPart] = {}
        self._count = count
        self._sizes = sizes
        self._pairs = pairs
        self._gaps = gaps
        self._copies = 2 if pairs else 1
        copies = {}
        for name, size in sizes.items():
            copies[name] = [RowBuffer(count, size) for _ in range(self._copies)]
        self._rows = copies
        self._missing: dict[str, set[int]] = {name: set() for name in sizes}

    def add_frame(self, sensor: str, frame: Embeddings) -> bool:
        """Take in what a sensor sent; whether its part is whole now.

        Of an earlier round: without effect.

        Raises:
            PeerError: it cannot be true.
        """
        if frame.run != self.run:
            raise PeerError(sensor, "its embeddings are of another run", self.round)
        if (frame.attempt, frame.round) > (self.attempt, self.round):
            raise PeerError(
                sensor, f"its embeddings are of round {frame.round}, which is not open", self.round
            )
        if (frame.attempt, frame.round) != (self.attempt, self.round) or sensor in self.arrived:
            return False
        try:
            self._put(sensor, frame)
        except ValueError as error:
            remedy = AGAINST_DIVERGING if isinstance(error, OutOfScaleError) else ""
            raise PeerError(
                sensor, f"its embeddings cannot be used: {error}", self.round, remedy
            ) from None
        first, *second = self._rows[sensor]
        if not all(rows.complete for rows in (first, *second)):
            return False
        costs = ReportedTimes(frame.collection, frame.embedding, frame.iteration)
        missing = frozenset(self._missing.pop(sensor))
        second_or_none = second[0].tensor if second else None
        self.arrived[sensor] = SensorPart(first.tensor, second_or_none, missing, costs)
        del self._rows[sensor]
        return True

    def _put(self, sensor: str, frame: Embeddings) -> None:
        parts = (frame.received, frame.second) if self._pairs else (frame.received,)
        if bool(frame.second) != self._pairs or len({len(part) for part in parts}) > 1:
            raise ValueError(
                f"{len(frame.received)} bytes, and {len(frame.second)} of a second copy"
            )
        counts = [
            rows.put(frame.row, part) for rows, part in zip(self._rows[sensor], parts, strict=True)
        ]
        if frame.missing and not self._gaps:
            raise ValueError("it lacks products, and rounds wait for them here")
        if max(frame.missing, default=0) >= counts[0]:
            raise ValueError(f"row {max(frame.missing)} is missing of {counts[0]}")
        self._missing[sensor] |= {frame.row + row for row in frame.missing}

    def part_bytes(self, sensor: str) -> int:
        """About the most that the frames of a sensor's part take."""
        return 4096 + self._count * (4 * self._copies * self._sizes[sensor] + 8)

    def received_rows(self, sensor: str) -> int:
        """The number of rows that have arrived of a sensor, counting both copies:
        repetition does not raise it.
        """
        return (
            self._count
            if sensor in self.arrived
            else sum(rows.there for rows in self._rows[sensor])
        )

    def find_missing(self, sensors: Sequence[str]) -> list[str]:
        """Those of `sensors` whose part is not whole."""
        return [name for name in sensors if name not in self.arrived]

    def assemble(self) -> tuple[list[Tensor], Tensor]:
        """Embeddings [N, D_k] of all sensors, zeros for what is absent, and bool [N, K]:
        what is there.
        """
        present = torch.zeros(self._count, len(self._sizes), dtype=torch.bool)
        received = []
        for column, (name, size) in enumerate(self._sizes.items()):
            arrived = self.arrived.get(name)
            rows = arrived.received if arrived else torch.zeros(self._count, size)
            received.append(rows)
            present[:, column] = arrived is not None
            if arrived and arrived.missing:
                present[sorted(arrived.missing), column] = False
        return received, present
