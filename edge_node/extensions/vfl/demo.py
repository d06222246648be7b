"""Vertical federated learning on one machine: broker, head and sensors learn from drawn
products, then predict others.

Everything runs as the commands that a plant would type, in processes of their own.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from broker_config.broker.embedded import start_broker
from broker_config.protocol.errors import EdgeNodeError
from edge_node.extensions.vfl.drawn_products import (
    CLASSES,
    LABELS,
    DrawnStations,
    Products,
    append_products,
    append_rows,
)
from edge_node.extensions.vfl.server.journal import history
from trainer import progress
from trainer.demo.demo_processes import Process, Processes, clear_folder

# products
_START = 1000
_CHUNK = 20
_WINDOW = 1500
_HELD_OUT = 200  # products for each row of the table
_DEADLINE = 2.0  # seconds that the head waits for an absent sensor
_PATIENCE = 30.0  # seconds for all predictions


class Accuracy(Struct, frozen=True):
    """How well products were judged that a sensor did not see, or that all saw."""

    absent: str  # sensor; empty: none
    accuracy: float


class Outcome(Struct, frozen=True, kw_only=True):
    """What the demo found."""

    sensors: tuple[str, ...]
    rounds: int
    milliseconds_round: float  # median
    products: int  # held out, for each of `judged`
    guessing: float  # share of the most frequent class
    judged: tuple[Accuracy, ...]
    milliseconds_prediction: float  # median, since the last embedding came
    seconds: float  # of the whole demo


class _Case(NamedTuple):
    absent: str
    products: Products


def run_demo(
    out: Path, report: progress.Report, *, stations: int, rounds: int, seed: int
) -> Outcome:
    """Run the story and leave data, models, predictions and logs in `out`,
    which is emptied if it is an earlier run's.

    Raises:
        EdgeNodeError: what failed, with the log of the process that did.
    """
    started = time.monotonic()
    clear_folder(out)
    drawn = DrawnStations(stations, seed)
    learnt = _START + _CHUNK * (rounds - 1)
    report(progress.Step(what=f"drawing {learnt} products of {stations} stations"))
    append_products(drawn, out, 0, learnt)
    cases = [
        _Case(absent, drawn.draw(learnt + number * _HELD_OUT, learnt + (number + 1) * _HELD_OUT))
        for number, absent in enumerate(("", *drawn.stations))
    ]
    with Processes(out / "logs") as processes, start_broker(out / "broker") as broker:
        report(progress.Note(text=f"broker: {broker.kind} at {broker.url}"))
        report(
            progress.Step(what=f"a head and {stations} sensors learn together for {rounds} rounds")
        )
        _learn(processes, broker.url, drawn, out, rounds, seed, report)
        report(
            progress.Step(
                what=(
                    f"services of the head and the sensors judge {len(cases) * _HELD_OUT} new "
                    "products"
                )
            )
        )
        said = _serve(processes, broker.url, drawn, out, cases)
    labels = np.concatenate([case.products.labels for case in cases])
    return Outcome(
        sensors=tuple(drawn.stations),
        rounds=rounds,
        milliseconds_round=1000 * median(closed.seconds for closed in history(out / "head")[1:]),
        products=_HELD_OUT,
        guessing=float(np.bincount(labels).max() / len(labels)),
        judged=tuple(Accuracy(case.absent, _accuracy(case.products, said)) for case in cases),
        milliseconds_prediction=median(said[name].latency_ms for name in cases[0].products.names),
        seconds=time.monotonic() - started,
    )


def print_table(outcome: Outcome, console: Console) -> None:
    """Print what came of it."""
    shown = Table(
        "sensors that saw the products",
        "right",
        title=f"{outcome.products} new products for each row",
    )
    for judged in outcome.judged:
        who = f"all but {judged.absent}" if judged.absent else f"all: {', '.join(outcome.sensors)}"
        shown.add_row(who, f"{100 * judged.accuracy:.1f} %")
    shown.add_row("none: the most frequent class", f"{100 * outcome.guessing:.1f} %")
    console.print(shown)
    console.print(
        f"{outcome.milliseconds_round:.1f} ms a round; {outcome.milliseconds_prediction:.1f} ms "
        f"from last embedding to prediction; {outcome.seconds:.0f} s in all",
        highlight=False,
    )


def _learn(
    processes: Processes,
    url: str,
    drawn: DrawnStations,
    out: Path,
    rounds: int,
    seed: int,
    report: progress.Report,
) -> None:
    """Head and sensors until the last round; shows what the head tells."""
    head = processes.start(
        "head",
        "vfl",
        "coordinate",
        url,
        "--sensors",
        ",".join(drawn.stations),
        "--labels",
        str(out / LABELS),
        "--classes",
        ",".join(CLASSES),
        "--start",
        str(_START),
        "--chunk",
        str(_CHUNK),
        "--window",
        str(_WINDOW),
        "--iterations",
        "5",
        "--policy",
        "all",
        "--rounds",
        str(rounds),
        "--seed",
        str(seed),
        "--state",
        str(out / "head"),
        "--json",
        events=True,
    )
    sensors = []
    for name, columns in drawn.stations.items():
        sensors.append(
            processes.start(
                name,
                "vfl",
                "join",
                url,
                "--sensor",
                name,
                "--columns",
                ",".join(column.name for column in columns),
                "--data",
                str(out / f"{name}.csv"),
                "--state",
                str(out / name),
                "--json",
                events=True,
            )
        )
    for process, event in processes.read_events(head, *sensors):
        if process is head and not isinstance(event, progress.Result):
            report(event)


class _Prediction(Struct):
    """What is read of a prediction."""

    product: str
    class_: str = msgspec.field(name="class")
    latency_ms: float


def _serve(
    processes: Processes, url: str, drawn: DrawnStations, out: Path, cases: Sequence[_Case]
) -> dict[str, _Prediction]:
    """Let products pass, each case's without its absent sensor; the final prediction of each."""
    predictions = out / "predictions.jsonl"
    services = [
        processes.start(
            "head-service",
            "vfl",
            "serve",
            str(out / "head" / "bundle"),
            url,
            "--output",
            str(predictions),
            "--deadline",
            str(_DEADLINE),
        )
    ]
    for name in drawn.stations:
        rows = str(out / f"{name}.csv")
        services.append(
            processes.start(
                f"{name}-service", "vfl", "serve", str(out / name / "bundle"), url, "--data", rows
            )
        )
    for service in services:
        processes.wait_until_ready(service)
    for case in cases:
        for name in drawn.stations:
            if name != case.absent:
                append_rows(drawn, out, case.products, name)
    wanted = set(chain.from_iterable(case.products.names for case in cases))
    said = _awaited(predictions, wanted, services)
    for service in services:
        processes.stop(service)
    return said


def _awaited(path: Path, wanted: set[str], services: Sequence[Process]) -> dict[str, _Prediction]:
    """The predictions of all these products, once they are there."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        said = {each.product: each for each in _read(path)}
        if said.keys() >= wanted:
            return said
        for service in services:
            if service.popen.poll() is not None:
                raise service.failure()
        if time.monotonic() > deadline:
            raise EdgeNodeError(
                f"{len(wanted - said.keys())} of {len(wanted)} products were not judged",
                f"see {path.parent / 'logs'}",
            )
        time.sleep(0.05)


def _read(path: Path) -> Iterator[_Prediction]:
    if path.exists():
        for text in path.read_bytes().split(b"\n")[:-1]:
            yield msgspec.json.decode(text, type=_Prediction)


def _accuracy(products: Products, said: dict[str, _Prediction]) -> float:
    right = [
        said[name].class_ == CLASSES[label]
        for name, label in zip(products.names, products.labels, strict=True)
    ]
    return sum(right) / len(right)
