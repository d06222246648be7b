"""Export of a vertical federation's models as bundles, while they are trained."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.topics import COORDINATOR
from edge_node.extensions.vfl.algorithm import Head, Sensor
from edge_node.extensions.vfl.imputer import LARGEST, Imputer
from edge_node.extensions.vfl.line.party_bundle import Description, EmbeddingSource, write_bundle
from edge_node.extensions.vfl.line.sensor_rows import RowFile, Scaling
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.networks import embedding_size
from edge_node.extensions.vfl.party_graph import (
    Imputation,
    build_head_graph,
    build_sensor_graph,
    impute_means,
)
from export.bundle_signing import Signer

log = logging.getLogger(__name__)

EXPORT_INTERVAL = 30.0  # seconds between two bundles
_PAUSE = 2.0  # seconds, at least
_LONG = 3  # times as long as the last round: rounds pause


class ExportSchedule:
    """The rounds after which a bundle is written: about every half minute, and once rounds pause.

    Sensors and head each take the rounds that are multiples of 1, 2, 4, 8, ..., the least that
    lasts `seconds`; so those of unequal speed meet in most of their rounds, and their models belong
    together.
    """

    def __init__(self, seconds: float = EXPORT_INTERVAL):
        self._seconds = seconds
        # the newest round, its end, how long it took
        self._newest = 0
        self._moved = time.monotonic()
        self._lasted = 0.0
        # when the last one was taken that is such a multiple
        self._step = 1
        self._turn = self._moved
        # the round of the newest bundle
        self._written = 0
        self._when = -inf

    def due(self, round_: int, *, last: bool = False) -> bool:
        """Whether a bundle is due, to be asked after each round and from time to time;
        at the `last` call it is.
        """
        now = time.monotonic()
        is_new = round_ != self._newest
        if is_new:
            self._newest = round_
            self._lasted = now - self._moved
            self._moved = now
        if round_ in (0, self._written):
            return False
        if last:
            due = True
        elif is_new:
            due = self._is_turn(round_, now)
        else:
            due = self._has_paused(now)
        if due:
            self._written = round_
            self._when = now
        return due

    def _is_turn(self, round_: int, now: float) -> bool:
        if round_ % self._step:
            return False
        passed = now - self._turn
        if passed < self._seconds:
            self._step *= 2
            return False
        if self._step > 1 and passed > 2 * self._seconds:
            self._step //= 2
        self._turn = now
        return True

    def _has_paused(self, now: float) -> bool:
        return (
            now - self._moved >= max(_PAUSE, _LONG * self._lasted)
            and now - self._when >= self._seconds
        )


class SensorBundleWriter:
    """Writes a sensor's bundles into `folder`, signed if there is a `signer`:
    to be called as Deploy says.
    """

    def __init__(
        self,
        folder: Path,
        rows: RowFile,
        signer: Signer | None = None,
        seconds: float = EXPORT_INTERVAL,
    ):
        self._folder = folder
        self._rows = rows
        self._signer = signer
        self._pace = ExportSchedule(seconds)

    def __call__(
        self, spec: VflSpec, round_: int, sensor: Sensor, scaling: Scaling, *, last: bool
    ) -> None:
        """Write one if it is time; if that fails, training goes on,
        and the last one stays in effect.
        """
        if self._pace.due(round_, last=last):
            with _log_failure(round_):
                self._write(spec, round_, sensor, scaling)

    def _write(self, spec: VflSpec, round_: int, sensor: Sensor, scaling: Scaling) -> None:
        rows = self._rows
        shape = (len(rows.columns), spec.cycles)
        size = embedding_size(spec.network, shape)
        graph = build_sensor_graph(sensor.model, shape, size, scaling)
        about = _describe(
            spec, round_, sensor.name, "sensor", [EmbeddingSource(name=sensor.name, size=size)]
        )
        assert sensor.extent, "a sensor's bundle follows a round"
        low, high, deviation = sensor.extent
        about = replace(
            about,
            columns=rows.cells,
            product=rows.product,
            unit=rows.unit,
            low=tuple(low.tolist()),
            high=tuple(high.tolist()),
            deviation=deviation,
        )
        signer = self._signer.own() if self._signer else None
        write_bundle(self._folder, about, {"sensor": graph.content}, graph.golden, signer)


class HeadBundleWriter:
    """Writes the head's bundles, likewise, with the agent that decides local iterations,
    if one does.
    """

    def __init__(
        self, folder: Path, signer: Signer | None = None, seconds: float = EXPORT_INTERVAL
    ):
        self._folder = folder
        self._signer = signer
        self._pace = ExportSchedule(seconds)

    def __call__(
        self, spec: VflSpec, round_: int, head: Head, embeddings: Sequence[Tensor], *, last: bool
    ) -> None:
        """Write one if it is time; `embeddings` [N, D_k] of this round, denoised,
        say what stands in for absent ones.

        If that fails, training goes on, and the last one stays in effect.
        """
        if self._pace.due(round_, last=last):
            with _log_failure(round_):
                self._write(spec, round_, head, embeddings)

    def _write(self, spec: VflSpec, round_: int, head: Head, embeddings: Sequence[Tensor]) -> None:
        sizes = [each.shape[1] for each in embeddings]
        values = [float(name) for name in spec.classes] if spec.reading == "expectation" else None
        graph = build_head_graph(head, sizes, _fit_imputation(embeddings), values)
        sensors = [
            EmbeddingSource(name=name, size=size)
            for name, size in zip(spec.sensors, sizes, strict=True)
        ]
        about = _describe(spec, round_, COORDINATOR, "head", sensors)
        signing = self._signer.own() if self._signer else None
        write_bundle(
            self._folder,
            about,
            {"head": graph.content, **_load_policy(spec)},
            graph.golden,
            signing,
        )


@contextmanager
def _log_failure(round_: int) -> Iterator[None]:
    """Log what kept a bundle from being written."""
    try:
        yield
    except (EdgeNodeError, OSError) as error:
        log.warning("there is no bundle of round %d: %s", round_, error)


def _load_policy(spec: VflSpec) -> dict[str, bytes]:
    return {"policy": Path(spec.policy).read_bytes()} if spec.policy.endswith(".onnx") else {}


def _fit_imputation(embeddings: Sequence[Tensor]) -> Imputation:
    """By ridge regression from these embeddings;
    by their means where they are too long for that.
    """
    sizes = [each.shape[1] for each in embeddings]
    if sum(sizes) > LARGEST:
        return impute_means(torch.cat(list(embeddings), 1).mean(0), sizes)
    imputer = Imputer(sizes)
    imputer.update(embeddings)
    weights: Imputation = imputer.regression
    return weights


def _describe(
    spec: VflSpec,
    round_: int,
    node: str,
    role: Literal["sensor", "head"],
    sensors: Sequence[EmbeddingSource],
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
