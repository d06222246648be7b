"""Latency of predictions from several sensors:
`python -m benchmarks.vfl_predictions [--products N] [--json]`.

From a product's last embedding leaving to its final prediction arriving, over MQTT on this machine,
beside the bare round trip through the same broker: while all train as fast as they can, and alone.
Rows are timed too, from the moment when the last sensor's row is in its file.
"""

import argparse
import json
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.drawn_products import (
    CLASSES,
    LABELS,
    DrawnStations,
    append_products,
    append_rows,
)
from edge_node.extensions.vfl.frames import Embedded, encode_frame
from edge_node.extensions.vfl.line.party_bundle import Manifest, read_bundle
from trainer.demo.demo_processes import Processes

_PAUSE = 0.02  # seconds between two products
_ROUNDS = 40_000  # more than will be played


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = dict(measured(Path(name), options.products))
    if options.json:
        print(json.dumps(rows))
        return
    print("milliseconds               p50     p99     max")
    for what, times in rows.items():
        print(
            f"{what:22} {np.percentile(times, 50):7.2f} {np.percentile(times, 99):7.2f} "
            f"{max(times):7.2f}"
        )


def measured(folder: Path, products: int) -> Iterator[tuple[str, list[float]]]:
    """What was measured, and milliseconds of each product."""
    stations = DrawnStations(3, 0)
    append_products(stations, folder, 0, 1000 + _ROUNDS)
    with (
        Processes(folder / "logs") as processes,
        start_broker(folder / "broker", kind="mosquitto") as broker,
    ):
        training = [
            processes.start(
                "head",
                "vfl",
                "coordinate",
                broker.url,
                "--sensors",
                ",".join(stations.stations),
                "--start",
                "1000",
                "--labels",
                str(folder / LABELS),
                "--classes",
                ",".join(CLASSES),
                "--chunk",
                "1",
                "--window",
                "1000",
                "--state",
                str(folder / "head"),
            )
        ]
        for name, columns in stations.stations.items():
            training.append(
                processes.start(
                    name,
                    "vfl",
                    "join",
                    broker.url,
                    "--sensor",
                    name,
                    "--state",
                    str(folder / name),
                    "--columns",
                    ",".join(each.name for each in columns),
                    "--data",
                    str(folder / f"{name}.csv"),
                )
            )
        members = ["head", *stations.stations]
        _wait(
            lambda: all((folder / name / "bundle" / "manifest.json").exists() for name in members)
        )
        # services read their own copies: training has all rows already
        for name in stations.stations:
            (folder / f"{name}.new").mkdir()
            append_rows(stations, folder / f"{name}.new", stations.draw(0, 1), name)
        services = [
            processes.start(
                "head-service", "vfl", "serve", str(folder / "head" / "bundle"), broker.url
            )
        ]
        for name in stations.stations:
            data = str(folder / f"{name}.new" / f"{name}.csv")
            arguments = ("vfl", "serve", str(folder / name / "bundle"), broker.url, "--data", data)
            services.append(processes.start(f"{name}-service", *arguments))
        for service in services:
            processes.wait_until_ready(service)
        inbox: queue.Queue[Any] = queue.Queue()
        federation = "default"
        with MqttClient(
            Endpoint.parse(broker.url), "measure", inbox=inbox, persistent=False
        ) as mqtt:
            mqtt.subscribe(
                vfl_topics.predictions(federation), "edge-node/v1/default/vfl/measure/products"
            )
            _wait(lambda: mqtt.await_subscription(1))
            for when in ("while training", "alone"):
                if when == "alone":
                    for process in training:
                        process.popen.terminate()
                    for process in training:
                        process.popen.wait()
                yield f"bare, {when}", _bare(mqtt, inbox, products)
                manifest = read_bundle(folder / "head" / "bundle").manifest
                yield f"embedding, {when}", _embeddings(mqtt, inbox, manifest, products, when)
                first = 10**6 + (when == "alone") * products
                yield f"row, {when}", _rows(inbox, stations, folder, first, products)


def _bare(mqtt: MqttClient, inbox: "queue.Queue[Any]", products: int) -> list[float]:
    """Round trips of an embedding's bytes."""
    topic, times = "edge-node/v1/default/vfl/measure/products", []
    for number in range(products):
        time.sleep(_PAUSE)
        payload = b"%08d" % number + bytes(150)
        begun = time.perf_counter()
        mqtt.publish(topic, payload)
        _wait_for_message(inbox, lambda found, payload=payload: found == payload)  # type: ignore[misc]
        times.append(1000 * (time.perf_counter() - begun))
    return times


def _embeddings(
    mqtt: MqttClient, inbox: "queue.Queue[Any]", manifest: Manifest, products: int, prefix: str
) -> list[float]:
    """From the last embedding of a product to its final prediction."""
    times, random = [], np.random.default_rng(0)
    for number in range(products):
        time.sleep(_PAUSE)
        product = f"{prefix}-{number}"
        for sensor in manifest.sensors:
            values = random.random(sensor.size, np.float32).tobytes()
            frame = Embedded(
                run=manifest.run, round=manifest.round, product=product, embedding=values
            )
            begun = time.perf_counter()
            mqtt.publish(vfl_topics.products("default", sensor.name), encode_frame(frame))
        _final(inbox, product)
        times.append(1000 * (time.perf_counter() - begun))
    return times


def _rows(
    inbox: "queue.Queue[Any]", stations: DrawnStations, folder: Path, first: int, products: int
) -> list[float]:
    """From the last row of a product in its file to its final prediction."""
    times = []
    for number in range(products):
        time.sleep(_PAUSE)
        drawn = stations.draw(first + number, first + number + 1)
        for name in stations.stations:
            append_rows(stations, folder / f"{name}.new", drawn, name)
        begun = time.perf_counter()
        _final(inbox, drawn.names[0])
        times.append(1000 * (time.perf_counter() - begun))
    return times


def _final(inbox: "queue.Queue[Any]", product: str) -> None:
    def is_it(payload: bytes) -> bool:
        found = json.loads(payload) if payload.startswith(b"{") else {}
        return (found.get("product"), found.get("answer")) == (product, "final")

    _wait_for_message(inbox, is_it)


def _wait_for_message(inbox: "queue.Queue[Any]", met: Callable[[bytes], bool]) -> None:
    while True:
        event = inbox.get(timeout=30)
        if isinstance(event, Delivery) and met(event.payload):
            return


def _wait(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.1)


if __name__ == "__main__":
    main()
