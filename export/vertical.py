"""A line's models -> bundles, while they are trained."""

import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from broker_config.topics import COORDINATOR
from broker_config.vertical import LineSpec
from edge.vertical.bundle import Description, Source, write
from edge.vertical.rows import Scaling
from export.signing import Signer
from export.vertical_graph import Fill, by_means, head_graph, sensor_graph
from trainer.vertical.imputer import LARGEST, Imputer
from trainer.vertical.networks import embedding_size
from trainer.vertical.parties import Head, Sensor


class Rows(NamedTuple):
    """What a sensor's bundle says about the rows that its samples are made of."""

    columns: tuple[str, ...]
    product: str
    unit: str | None


class Pace:
    """At which commits a bundle is written: about every half minute, at round numbers.

    All parties of a line commit at the same rounds. Each takes every 1st, 2nd, 4th, 8th ... commit, the least that
    lasts `seconds`; so those of unequal speed meet in most of their rounds, and their models belong together.
    """

    def __init__(self, commit: int, seconds: float = 30.0):
        self._commit, self._seconds = commit, seconds
        self._step, self._last = 1, -inf

    def due(self, round_: int) -> bool:
        """Whether this commit is one."""
        if round_ // self._commit % self._step:
            return False
        now = time.monotonic()
        if now - self._last < self._seconds:
            self._step *= 2
            return False
        if self._step > 1 and now - self._last > 4 * self._seconds:
            self._step //= 2
        self._last = now
        return True


class SensorBundles:
    """Writes a sensor's bundles into `folder`, signed if there is a `signer`: to be called at each commit."""

    def __init__(self, folder: Path, spec: LineSpec, rows: Rows, signer: Signer | None, pace: Pace):
        self._folder, self._spec, self._rows, self._signer, self._pace = folder, spec, rows, signer, pace

    def __call__(self, round_: int, sensor: Sensor, scaling: Scaling) -> None:
        """Write one if it is time. LineParityError, EdgeNodeError if the disk does not take it."""
        if not self._pace.due(round_):
            return
        spec, rows = self._spec, self._rows
        shape = (len(rows.columns), spec.cycles)
        size = embedding_size(spec.network, shape)
        graph = sensor_graph(sensor.model, shape, size, scaling)
        about = _about(spec, round_, sensor.name, "sensor", [Source(name=sensor.name, size=size)])
        about = replace(about, columns=rows.columns, product=rows.product, unit=rows.unit)
        write(
            self._folder, about, {"sensor": graph.content}, graph.golden, self._signer.own() if self._signer else None
        )


class HeadBundles:
    """Writes the head's bundles, likewise; `policy` is the ONNX agent that decides local iterations, if one does."""

    def __init__(self, folder: Path, spec: LineSpec, signer: Signer | None, pace: Pace, policy: bytes | None = None):
        self._folder, self._spec, self._signer, self._pace = folder, spec, signer, pace
        self._others = {"policy": policy} if policy else {}

    def __call__(self, round_: int, head: Head, embeddings: Sequence[Tensor]) -> None:
        """Write one if it is time; `embeddings` [N, D_k] of this round, denoised, say what stands in for absent ones.

        LineParityError, EdgeNodeError if the disk does not take it.
        """
        if not self._pace.due(round_):
            return
        spec, sizes = self._spec, [each.shape[1] for each in embeddings]
        values = [float(name) for name in spec.classes] if spec.reading == "expectation" else None
        graph = head_graph(head, sizes, _fill(embeddings), values)
        sensors = [Source(name=name, size=size) for name, size in zip(spec.sensors, sizes, strict=True)]
        about = _about(spec, round_, COORDINATOR, "head", sensors)
        signing = self._signer.own() if self._signer else None
        write(self._folder, about, {"head": graph.content, **self._others}, graph.golden, signing)


def _fill(embeddings: Sequence[Tensor]) -> Fill:
    """By ridge regression from these embeddings; by their means where they are too long for that."""
    sizes = [each.shape[1] for each in embeddings]
    if sum(sizes) > LARGEST:
        return by_means(torch.cat(list(embeddings), 1).mean(0), sizes)
    imputer = Imputer(sizes)
    imputer.learn(embeddings)
    weights: Fill = imputer.weights
    return weights


def _about(
    spec: LineSpec, round_: int, node: str, role: Literal["sensor", "head"], sensors: Sequence[Source]
) -> Description:
    return Description(
        federation=spec.federation,
        run=spec.run,
        node=node,
        role=role,
        model=spec.network,
        round=round_,
        sensors=tuple(sensors),
        classes=spec.classes,
        reading=spec.reading,
        cycles=spec.cycles,
        channel=spec.channel,
        privacy=spec.privacy,
        seed=spec.seed,
    )
