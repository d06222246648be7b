"""Lines for tests: their data as files, their processes, what they leave, and what a simulation leaves."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from broker_config.endpoint import Endpoint
from broker_config.vertical import LineSpec, Window
from edge.vertical.rows import Samples
from trainer import progress
from trainer.vertical.head import coordinate
from trainer.vertical.joining import Source
from trainer.vertical.labels import Labels
from trainer.vertical.sensor import take_part
from trainer.vertical.simulate import Line, Stream
from trainer.vertical.terms import new_run

COLUMNS = {"press": ("force", "speed"), "oven": ("heat",), "lamp": ("red", "green", "blue")}
CLASSES = ("good", "bad", "ugly")


def line_spec(sensors: Sequence[str] = ("press", "oven"), **fields: Any) -> LineSpec:
    """A small line."""
    run = new_run()
    return LineSpec(
        federation=f"line-{run}", run=run, software="test", sensors=tuple(sensors), network="dense", classes=CLASSES,
        **{"window": Window(start=20, chunk=4, size=24), "commit": 3, "patience": 1.0, "policy": "all"} | fields,
    )  # fmt: skip


def draw(folder: Path, products: int, seed: int) -> None:
    """A CSV file for each sensor, and the labels, which hang on all of them."""
    random = np.random.default_rng(seed)
    values = {name: random.normal(20, 3, (products, len(names))) for name, names in COLUMNS.items()}
    score = sum(((each - 20) / 3).sum(1) for each in values.values())
    files = {
        f"{name}.csv": [",".join(("product", *names)), *(_row(number, row) for number, row in enumerate(values[name]))]
        for name, names in COLUMNS.items()
    }
    codes = np.digitize(score, [-1, 1])
    files["labels.csv"] = ["product,label", *(f"p{number},{CLASSES[code]}" for number, code in enumerate(codes))]
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


def source(data: Path, sensor: str) -> Source:
    """What `draw` has written for a sensor."""
    return Source(data / f"{sensor}.csv", COLUMNS[sensor])


def simulated(spec: LineSpec, data: Path, rounds: int) -> dict[str, dict[str, bytes]]:
    """The same line in this process: tensors of each party."""
    labels = Labels(data / "labels.csv", spec.classes)
    labels.refresh()
    first = labels.products(0, spec.window.start)
    everything = labels.products(0, labels.count)
    streams = []
    for name in spec.sensors:
        samples = Samples(data / f"{name}.csv", COLUMNS[name], spec.cycles)
        samples.refresh()
        samples.settle(first)
        streams.append(torch.from_numpy(samples.take(everything)[0].copy()))
    line = Line(spec, Stream(tuple(streams), torch.from_numpy(labels.labels(0, labels.count))))
    for _ in range(rounds):
        line.step([spec.iterations] * len(spec.sensors))
    found = {sensor.name: _bytes(sensor.model.state_dict()) for sensor in line.sensors}
    return {**found, "head": _bytes(line.head.model.state_dict())}


def left(spec: LineSpec, folder: Path, rounds: int) -> dict[str, dict[str, bytes]]:
    """What the parties of a line have on their disks at the end of a round, likewise."""
    found = {}
    for party in (*spec.sensors, "head"):
        [path] = (folder / party).glob(f"*/{rounds:012}.safetensors")
        prefix = "head." if party == "head" else "model."
        state = {n.removeprefix(prefix): value for n, value in load_file(path).items() if n.startswith(prefix)}
        found[party] = _bytes(state)
    return found


def _bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in state.items()}


class Ended:
    """Events of a party that runs in a thread, and what asks it to stop."""

    def __init__(self) -> None:
        self.events: list[progress.AnyEvent] = []
        self.stop = threading.Event()

    def notes(self) -> str:
        """All that it has said."""
        return "\n".join(map(progress.describe, self.events))


def in_threads(
    spec: LineSpec, url: str, data: Path, folder: Path, rounds: int, seconds: float = 60
) -> dict[str, Ended]:
    """Play a line over a broker, each party in a thread; return when it is over."""
    parties = {name: Ended() for name in ("head", *spec.sensors)}
    timer = threading.Timer(seconds, lambda: [each.stop.set() for each in parties.values()])
    timer.start()
    endpoint = Endpoint.parse(url)

    def head() -> int:
        ended = parties["head"]
        return coordinate(
            spec, data / "labels.csv", endpoint, folder / "head", rounds=rounds, new=False,
            report=ended.events.append, stop=ended.stop.is_set,
        )  # fmt: skip

    def sensor(name: str) -> tuple[int, bool]:
        ended = parties[name]
        return take_part(
            spec, name, source(data, name), endpoint, folder / name, report=ended.events.append, stop=ended.stop.is_set
        )

    with ThreadPoolExecutor(1 + len(spec.sensors)) as pool:
        jobs = [pool.submit(head), *(pool.submit(sensor, name) for name in spec.sensors)]
        if any(job.exception() for job in as_completed(jobs)):
            for each in parties.values():
                each.stop.set()
        reached = [job.result() for job in jobs]
    timer.cancel()
    assert reached == [rounds, *((rounds, True) for _ in spec.sensors)], [each.notes() for each in parties.values()]
    return parties
