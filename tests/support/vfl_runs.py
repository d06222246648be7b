"""VFL runs for tests: their data as files, their sensors and head in threads,
their checkpoints, and a simulation's.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.messages import REVISION
from edge_node.extensions.vfl.client.session import take_part
from edge_node.extensions.vfl.line.sensor_rows import RowFile, Samples
from edge_node.extensions.vfl.messages import Recipe, VflSpec, Window
from edge_node.extensions.vfl.server.head_state import TIMING, Timing
from edge_node.extensions.vfl.server.labels import Labels
from edge_node.extensions.vfl.server.spec import new_run_id
from edge_node.extensions.vfl.server.startup import coordinate
from edge_node.extensions.vfl.simulation import Simulation, Stream
from tests.support.waiting import PATIENCE, wait_until
from trainer import progress

COLUMNS = {"press": ("force", "speed"), "oven": ("heat",), "lamp": ("red", "green", "blue")}
CLASSES = ("good", "bad", "ugly")
Settings = Mapping[str, tuple[str, ...]]
"""Columns that say the operating condition, by sensor."""


def vfl_spec(sensors: Sequence[str] = ("press", "oven"), **fields: Any) -> VflSpec:
    """A small vertical federation."""
    run = new_run_id()
    return VflSpec(
        federation=f"vfl-{run}",
        run=run,
        software="test",
        sensors=tuple(sensors),
        network="dense",
        **{
            "classes": CLASSES,
            "window": Window(start=20, chunk=4, size=24),
            "recipe": Recipe(eta=0.1),
            "commit": 3,
            "patience": 1.0,
            "policy": "all",
            "revision": REVISION,
        }
        | fields,
    )


def draw(folder: Path, products: int, seed: int) -> None:
    """A CSV file for each sensor, and the labels, which hang on all of them."""
    random = np.random.default_rng(seed)
    values = {name: random.normal(20, 3, (products, len(names))) for name, names in COLUMNS.items()}
    score = sum(((each - 20) / 3).sum(1) for each in values.values())
    files = {
        f"{name}.csv": [
            ",".join(("product", *names)),
            *(_row(number, row) for number, row in enumerate(values[name])),
        ]
        for name, names in COLUMNS.items()
    }
    codes = np.digitize(score, [-1, 1])
    files["labels.csv"] = [
        "product,label",
        *(f"p{number},{CLASSES[code]}" for number, code in enumerate(codes)),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / name).write_text("\n".join(rows) + "\n")


def _row(number: int, values: np.ndarray) -> str:
    return f"p{number},{','.join(f'{value:.4f}' for value in values)}"


def feed(whole: Path, folder: Path, products: int) -> None:
    """Let the files in `folder` grow to so many products of those in `whole`."""
    folder.mkdir(exist_ok=True)
    for path in whole.glob("*.csv"):
        grown = folder / path.name
        there = grown.read_text() if grown.exists() else ""
        rows = "".join(path.read_text().splitlines(keepends=True)[: products + 1])
        with grown.open("a") as file:
            file.write(rows[len(there) :])


def source(data: Path, sensor: str, settings: Settings = {}) -> RowFile:  # noqa: B006
    """What `draw` has written for a sensor."""
    return RowFile(data / f"{sensor}.csv", COLUMNS[sensor], settings=settings.get(sensor, ()))


def simulate_run(spec: VflSpec, data: Path, settings: Settings = {}) -> Simulation:  # noqa: B006
    """The run in this process, before its first round."""
    labels = Labels(data / "labels.csv", spec.classes)
    labels.refresh()
    first = labels.products(0, spec.window.start)
    everything = labels.products(0, labels.count)
    streams = []
    for name in spec.sensors:
        samples = Samples(source(data, name, settings), spec.cycles)
        samples.refresh()
        samples.fit_scaling(first)
        streams.append(torch.from_numpy(samples.get(everything)[0].copy()))
    return Simulation(
        spec, Stream(tuple(streams), torch.from_numpy(labels.labels(0, labels.count)))
    )


def simulated(
    spec: VflSpec,
    data: Path,
    rounds: int,
    settings: Settings = {},  # noqa: B006
) -> dict[str, dict[str, bytes]]:
    """The tensors of each party after so many rounds of `simulate_run`."""
    simulation = simulate_run(spec, data, settings)
    for _ in range(rounds):
        simulation.step([spec.iterations] * len(spec.sensors))
    found = {sensor.name: _bytes(sensor.model.state_dict()) for sensor in simulation.sensors}
    return {**found, "head": _bytes(simulation.head.model.state_dict())}


def left(spec: VflSpec, folder: Path, rounds: int) -> dict[str, dict[str, bytes]]:
    """What head and sensors have on their disks at the end of a round, likewise."""
    found = {}
    for party in (*spec.sensors, "head"):
        path = max(
            (folder / party).glob(f"*/{rounds:012}-*.safetensors"),
            key=lambda each: each.stat().st_mtime,
        )
        prefix = "head." if party == "head" else "model."
        state = {
            n.removeprefix(prefix): value
            for n, value in load_file(path).items()
            if n.startswith(prefix)
        }
        found[party] = _bytes(state)
    return found


def _bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in state.items()}


class Threads:
    """Head and sensors in threads of this process: processes would above all import torch."""

    def __init__(
        self,
        spec: VflSpec,
        broker: str | Mapping[str, Endpoint],
        data: Path,
        folder: Path,
        rounds: int,
        *,
        new: bool = False,
        timing: Timing = TIMING,
        settings: Settings = {},  # noqa: B006
        deploys: Mapping[str, Any] = {},
    ):
        """At a broker's URL, or where each party has an endpoint of its own;
        `deploys` writes a party's bundles.
        """
        self.spec, self.folder = spec, folder
        self.events: dict[str, list[progress.AnyEvent]] = {}
        self._broker, self._data, self._rounds, self._new, self._timing = (
            broker,
            data,
            rounds,
            new,
            timing,
        )
        self._settings, self._deploys = settings, deploys
        self._jobs: dict[str, Future[object]] = {}
        self._stops: dict[str, threading.Event] = {}
        self._pool = ThreadPoolExecutor()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stop in self._stops.values():
            stop.set()
        self._pool.shutdown()

    def start(self, *parties: str) -> None:
        """Start these parties, for the first time or again."""
        for party in parties:
            events, stop = self.events.setdefault(party, []), threading.Event()
            self._stops[party], self._jobs[party] = (
                stop,
                self._pool.submit(self._run, party, events.append, stop.is_set),
            )

    def _run(self, party: str, report: progress.Report, stop: Callable[[], bool]) -> object:
        folder, broker, deploy = (
            self.folder / party,
            self._broker,
            self._deploys.get(party, _deploy_nothing),
        )
        endpoint = Endpoint.parse(broker) if isinstance(broker, str) else broker[party]
        if party == "head":
            labels = self._data / "labels.csv"
            return coordinate(
                self.spec,
                labels,
                endpoint,
                folder,
                rounds=self._rounds,
                new=self._new,
                report=report,
                stop=stop,
                timing=self._timing,
                deploy=deploy,
            )
        return take_part(
            self.spec,
            party,
            source(self._data, party, self._settings),
            endpoint,
            folder,
            report=report,
            stop=stop,
            deploying=lambda: deploy,
        )

    def stop(self, party: str) -> None:
        """Ask a party to end, and wait until it has."""
        self._stops[party].set()
        self._jobs.pop(party).result(60)

    def has_ended(self, party: str) -> bool:
        """Whether it has, in order or not."""
        return self._jobs[party].done()

    def result(self, party: str) -> object:
        """What a party has ended with; raised, if that is an error."""
        return self._jobs[party].result(60)

    def until(self, done: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for something while all run."""

        def none_has_failed() -> bool:
            for job in self._jobs.values():
                if job.done():
                    job.result()
            return True

        wait_until(done, meanwhile=none_has_failed, said=self.said, seconds=seconds)

    def reach(self, round_: int) -> None:
        """Wait until all that run have written down a round, or one after it:
        only the last ones are kept.
        """
        self.until(lambda: all(written(self.folder / party) >= round_ for party in self._jobs))

    def end(self, seconds: float = PATIENCE) -> None:
        """Wait until the run has ended for all."""
        self.until(lambda: all(job.done() for job in self._jobs.values()), seconds)
        reached = {party: job.result() for party, job in self._jobs.items()}
        assert reached == {
            each: self._rounds if each == "head" else (self._rounds, True) for each in reached
        }

    def said(self, party: str = "") -> str:
        """What a party, or all, have told."""
        told = [
            each for name, events in self.events.items() if party in ("", name) for each in events
        ]
        return "\n".join(map(progress.format_event, told))


def _deploy_nothing(*_: object, **__: object) -> None:
    pass


def written(state: Path) -> int:
    """The last round that a party has written down; 0 if none."""
    return max((int(path.name[:12]) for path in state.glob("[!.]*/[0-9]*.safetensors")), default=0)


def in_threads(
    spec: VflSpec, url: str, data: Path, folder: Path, rounds: int, timing: Timing = TIMING
) -> Threads:
    """Play a run over a broker to its end."""
    with Threads(spec, url, data, folder, rounds, timing=timing) as parties:
        parties.start("head", *spec.sensors)
        parties.end()
    return parties
