"""Training of a sensor's model: its rows, local iterations and checkpoints."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from broker_config.protocol.errors import EdgeNodeError, UsageError, abbreviate
from edge_node.extensions.vfl import tensor_frames
from edge_node.extensions.vfl.algorithm import Sensor
from edge_node.extensions.vfl.channel_noise import Array, Extent
from edge_node.extensions.vfl.checkpoint import Checkpoints, strip_prefix
from edge_node.extensions.vfl.client.local_round import LocalRound
from edge_node.extensions.vfl.client.target_round import ProductPositions, ReleasedSamples
from edge_node.extensions.vfl.frames import Opened, encode_frame
from edge_node.extensions.vfl.line.csv_tail import Warn
from edge_node.extensions.vfl.line.sensor_rows import RowFile, Samples, Scaling
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.networks import embedding_size
from edge_node.extensions.vfl.privacy import (
    ProtectionAccount,
    describe_spent,
    load_secret,
    run_secret,
)
from edge_node.extensions.vfl.simulation import release

_SOURCE = "source"  # name in a checkpoint
_RELEASED = "released"  # likewise
_PASSED_BY = 100  # rows
Taken = tuple[Array, tuple[int, ...]]
"""Samples of a round's products, float32 [N, columns, cycles],
and the rows of those that are lacking.
"""


class Deploy(Protocol):
    """Deployment of a sensor: called after each round, again and again while none is played,
    and at the end.
    """

    def __call__(
        self, spec: VflSpec, round_: int, sensor: Sensor, scaling: Scaling, *, last: bool
    ) -> None:
        """With the `last` call this process ends, or the run."""


class SensorTrainer:
    """The sensor as it learns.

    `round` is the last one that it has learnt from; `has_learnt`: since it was restored.
    """

    def __init__(
        self, spec: VflSpec, name: str, rows: RowFile, folder: Path, warn: Warn, deploy: Deploy
    ):
        self.spec = spec
        self.name = name
        self.rows = rows
        self.samples = Samples(rows, spec.cycles, warn)
        self.positions = ProductPositions()
        self.iteration = 0.0  # seconds, as measured in the last round
        self._size = embedding_size(spec.network, (self.samples.columns, spec.cycles))
        self._secret = run_secret(load_secret(folder), spec) if spec.privacy.clip else b""
        self._account = ProtectionAccount(folder)
        self._released = ReleasedSamples()
        self._deploy = deploy
        self._checkpoints = Checkpoints(folder / spec.run, warn)
        self.restore(max(self.kept))
        if self.round and _RELEASED in (state := self._checkpoints.load(self.round)):
            self._released = ReleasedSamples(state[_RELEASED].numpy())

    @property
    def product_bytes(self) -> int:
        """What one product of a round takes: its sample,
        and the embeddings that the head sends back.
        """
        sensors = len(self.spec.sensors) if self.spec.labels == "shared" else 1
        embeddings = self._size * sensors
        return 4 * (self.samples.columns * self.spec.cycles + embeddings)

    @property
    def kept(self) -> tuple[int, ...]:
        """Rounds whose end it can go back to."""
        return self._checkpoints.rounds

    def rewind(self, round_: int) -> bool:
        """Be at the end of a round, as a new attempt needs it. False if that cannot be now."""
        kept = [each for each in self.kept if each <= round_]
        if round_ != self.round and (round_ in kept or (kept and self.spec.absent != "wait")):
            self.restore(max(kept))
        elif round_ != self.round:
            return self.spec.absent != "wait"
        self._checkpoints.drop(round_ + 1)
        return True

    def restore(self, round_: int) -> None:
        """Be where a checkpoint was made; round 0 is before the first.

        UsageError if it is of other columns.
        """
        spec = self.spec
        shape = (self.samples.columns, self.spec.cycles)
        index = spec.sensors.index(self.name)
        self.sensor = Sensor(
            index,
            self.name,
            spec.network,
            shape,
            spec.recipe,
            spec.seed,
            spec.privacy.clip,
            self._secret,
        )
        self.samples.scaling = None
        self.round = round_
        self.has_learnt = False
        if round_:
            state = self._checkpoints.load(round_)
            self._check_source(state[_SOURCE].numpy().tobytes())
            self.sensor.model.load_state_dict(strip_prefix("model.", state))
            if scaling := strip_prefix("scaling.", state):  # else it had no rows yet
                self.samples.scaling = Scaling(
                    **{name: each.numpy() for name, each in scaling.items()}
                )
                low, high, deviation = (state[f"extent.{name}"] for name in Extent._fields)
                self.sensor.sent = Extent(low.numpy(), high.numpy(), deviation.item())

    def get_samples(self, products: Sequence[str]) -> Taken:
        """A round's samples, as far as the file has them by now."""
        taken = self.samples.get(products)
        if taken[1] and self.samples.refresh():
            return self.samples.get(products)
        return taken

    def has_passed(self, products: Sequence[str]) -> bool:
        """Whether the file is so far beyond these products that what it lacks of them will
        hardly come.
        """
        return self.samples.count_after(products) >= _PASSED_BY

    def describe_missing(self, lacking: Sequence[str]) -> str:
        """Products without a sample, and what would help."""
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        named = f"product {abbreviate(lacking[0], 64)}{others}"
        cycles = self.spec.cycles
        if all(map(self.samples.has_row, lacking)):
            return (
                f"rows before {named}: a sample takes {cycles} of a unit; leave such out of the "
                "labels"
            )
        return f"{named}: append its row"

    def start_round(
        self,
        frame: Opened,
        products: Sequence[str],
        taken: Taken,
        *,
        since: float,
        session: str,
        attempt: int,
    ) -> LocalRound:
        """Take part in a round, known of `since` then, with these samples."""
        if self.samples.scaling is None:
            self.samples.fit_scaling(products)
            taken = self.samples.get(products)
        values, missing = taken
        begun = time.monotonic()
        samples = torch.from_numpy(values.copy())
        if self.spec.privacy.clip and len({*products}) < len(products):
            raise EdgeNodeError(
                f"round {frame.round} names a product more than once: its embedding would leave "
                "with several noises",
                "nothing of this round was sent; have the head's label file name each product once",
            )
        if self._counts_window and (
            product := self._released.place(frame.first, products, values, missing)
        ):
            raise EdgeNodeError(
                f"round {frame.round} names product {abbreviate(product, 64)} at another position "
                "than before: its embedding would leave more often than the account counts",
                "nothing of this round was sent; have the head's label file name each product once",
            )
        self._account.spend(self.spec, frame.round)
        sent = release(self.spec, self.sensor, samples, frame.round)
        frames = tensor_frames.embedding_frames(
            sent.received,
            sent.second,
            missing,
            run=self.spec.run,
            attempt=attempt,
            round=frame.round,
            session=session,
            collection=begun - since,
            embedding=time.monotonic() - begun,
            iteration=self.iteration,
        )
        payloads = [encode_frame(each) for each in frames]
        count, size = sent.received.shape
        reply: tensor_frames.Reply = tensor_frames.GradientBuffer(count, size)
        if self.spec.labels == "shared":
            reply = tensor_frames.RepresentationBuffer(
                count, [size] * len(self.spec.sensors), len(self.spec.classes)
            )
        return LocalRound(frame.round, samples, missing, payloads, reply)

    @property
    def _counts_window(self) -> bool:
        """Whether the account counts fewer rounds for a product than are played."""
        return self.spec.privacy.clip > 0 and self.spec.window.size > 0

    def describe_spent(self, rounds: int) -> str:
        """What a product has spent of its protection, in so many rounds and in all runs;
        "" without any.
        """
        told = (describe_spent(self.spec, rounds), self._account.describe(self.spec))
        return "; ".join(filter(None, told))

    def train(self, turn: LocalRound) -> None:
        """Take the local iterations of a round."""
        begun = time.monotonic()
        if steps := turn.train(self.sensor):
            self.iteration = (time.monotonic() - begun) / steps

    def finish_round(self, round_: int) -> None:
        """A round is over; where it led is written down at the end of a group."""
        self.round = round_
        self.has_learnt = True
        if round_ % self.spec.commit == 0:
            self.commit()
        self.deploy(last=False)

    def deploy(self, *, last: bool) -> None:
        """Let the model be served as it is; `last`: there will be no other."""
        if self.samples.scaling:
            self._deploy(self.spec, self.round, self.sensor, self.samples.scaling, last=last)

    def commit(self) -> None:
        """Write down where this sensor is; what no checkpoint needs is forgotten."""
        scaling = self.samples.scaling
        extent = self.sensor.extent
        if self.round not in self.kept:
            state = {
                f"model.{name}": value for name, value in self.sensor.model.state_dict().items()
            }
            state[_SOURCE] = torch.frombuffer(bytearray(_read_as(self.rows)), dtype=torch.uint8)
            if self._counts_window:
                state[_RELEASED] = torch.from_numpy(self._released.array)
            if scaling and extent:
                state |= {
                    f"scaling.{name}": torch.from_numpy(each)
                    for name, each in scaling._asdict().items()
                }
                state |= {
                    f"extent.{name}": torch.as_tensor(each)
                    for name, each in extent._asdict().items()
                }
            self._checkpoints.save(self.round, state)
        first = self.spec.window.span(min(self.kept) + 1)[0]
        self.positions.drop_before(first)
        if products := self.positions.get(first, first + 1):
            self.samples.drop_before(products[0])

    def _check_source(self, before: bytes) -> None:
        """A model knows its columns by their order."""
        if before != (now := _read_as(self.rows)):
            raise UsageError(
                f"{self.name} has learnt from other columns: {before.decode()}; they are now "
                f"{now.decode()}",
                "pass the same --columns, --condition, --product and --unit, or choose another "
                "--state folder",
            )


def _read_as(rows: RowFile) -> bytes:
    """What a sensor's samples are made of."""
    condition = {"condition": rows.settings} if rows.settings else {}
    return msgspec.json.encode(
        {"columns": rows.columns, "product": rows.product, "unit": rows.unit, **condition}
    )
