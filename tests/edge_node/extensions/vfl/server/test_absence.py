"""Rounds that do not wait for absent sensors (`absent`: last, impute):
they go on without one, and readmit it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from torch import Tensor

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.endpoint import Endpoint
from edge_node.extensions.vfl.algorithm import Sensor
from edge_node.extensions.vfl.client.session import take_part
from edge_node.extensions.vfl.line.sensor_rows import RowFile
from edge_node.extensions.vfl.messages import VflSpec, Window
from edge_node.extensions.vfl.server.journal import ClosedRound, history
from edge_node.extensions.vfl.server.startup import coordinate
from edge_node.extensions.vfl.simulation import Release, release
from tests.support.mosquitto import Mosquitto
from tests.support.vfl_processes import WatchedProcess
from tests.support.vfl_sensor_files import CLASSES, COLUMNS, Plant, Processes
from tests.support.waiting import wait_until

HEAD, SENSORS = "coordinator", ("press", "oven")
WINDOW, CHUNK, COMMIT = 32, 2, 3
ENOUGH = 2 * COMMIT  # rounds


class Federation:
    """A vertical federation of real processes, with an endless supply of products."""

    def __init__(self, folder: Path, url: str, absent: str):
        self._plant = Plant(folder / "plant", SENSORS)
        settings = {
            "--start": WINDOW,
            "--window": WINDOW,
            "--chunk": CHUNK,
            "--iterations": 1,
            "--commit": COMMIT,
            "--policy": "all",
            "--absent": absent,
            "--patience": 1,
        }
        self._processes = Processes(folder, self._plant, url, settings)
        self.parties = {name: WatchedProcess(folder, name) for name in (HEAD, *SENSORS)}
        for name in self.parties:
            self.start(name)

    def start(self, name: str) -> None:
        """Start it, for the first time or again."""
        self.parties[name].start(self._processes.words(name))

    def until(self, what: Callable[[ClosedRound], bool]) -> int:
        """Run on until ENOUGH rounds after the present one are as they should be;
        return the last one.
        """
        after = self.parties[HEAD].last

        def found() -> list[ClosedRound]:
            self._plant.feed(
                max(0, WINDOW + CHUNK * (self.parties[HEAD].last + 50) - self._plant.products)
            )
            closed = [each for each in self.closed() if each.round > after and what(each)]
            return closed if len(closed) >= ENOUGH else []

        def run() -> bool:  # or are killed
            return not any(
                each.ended is not None and each.ended >= 0 for each in self.parties.values()
            )

        return wait_until(found, meanwhile=run, said=self.said)[-1].round

    def closed(self) -> list[ClosedRound]:
        """What the head has written down."""
        return history(self._processes.state(HEAD)) if self.parties[HEAD].last else []

    def said(self) -> str:
        """The end of each log."""
        return "\n".join(
            each.log.read_text()[-1000:] for each in self.parties.values() if each.log.exists()
        )

    def end(self) -> None:
        """Kill all."""
        for each in self.parties.values():
            each.kill()
        self._plant.close()


@pytest.fixture(params=["impute"])
def federation(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Federation]:
    broker = Mosquitto(tmp_path / "broker", persistence=False)
    broker.start()
    running = Federation(tmp_path, broker.url, request.param)
    yield running
    running.end()
    broker.kill()


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["shared", "server"])
def test_a_sensor_that_is_always_too_slow_does_not_hold_up_the_federation_again_and_again(
    labels: Literal["shared", "server"],
    tmp_path: Path,
    mosquitto: EmbeddedBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, patience, slow = 300, 2.0, threading.Event()

    def dawdle(spec: VflSpec, party: Sensor, samples: Tensor, round_: int) -> Release:
        if party.name == "oven" and round_ > 1:
            slow.set()
            time.sleep(3.0)  # longer than the head's patience
        return release(spec, party, samples, round_)

    monkeypatch.setattr("edge_node.extensions.vfl.client.sensor_trainer.release", dawdle)
    spec = VflSpec(
        federation="steel",
        run="0" * 16,
        software="",
        sensors=SENSORS,
        network="dense",
        classes=CLASSES,
        window=Window(start=WINDOW, chunk=CHUNK, size=WINDOW),
        absent="last",
        patience=patience,
        labels=labels,
    )
    plant = Plant(tmp_path / "plant", SENSORS)
    plant.feed(WINDOW + CHUNK * rounds)
    plant.close()
    endpoint = Endpoint.parse(mosquitto.url)

    def join(name: str) -> None:
        source = RowFile(plant.rows(name), COLUMNS, "product", None)
        take_part(
            spec, name, source, endpoint, tmp_path / name, report=lambda _: None, stop=ended.is_set
        )

    ended = threading.Event()
    sensors = [threading.Thread(target=join, args=(name,)) for name in SENSORS]
    for each in sensors:
        each.start()
    coordinate(
        spec,
        plant.labels,
        endpoint,
        tmp_path / HEAD,
        rounds=rounds,
        new=False,
        report=lambda _: None,
    )
    ended.set()  # after minutes, longer than a test may take, if most rounds had waited
    for each in sensors:
        each.join(60)
    closed = history(tmp_path / HEAD)
    assert slow.is_set()
    assert len(closed) == rounds
    assert all(closed[0].iterations)
    assert all(each.iterations[0] for each in closed)


def whole(round_: ClosedRound) -> bool:
    return all(round_.iterations)


@pytest.mark.slow
def test_a_federation_goes_on_without_a_dead_sensor_and_takes_it_back_even_after_the_heads_death(
    federation: Federation,
) -> None:
    federation.until(whole)
    federation.parties["oven"].kill()
    last = federation.until(lambda each: each.iterations == (1, 0))
    federation.start("oven")
    assert federation.until(whole) > last
    learnt = federation.parties["press"].rounds
    federation.parties[HEAD].kill()
    federation.start(HEAD)
    federation.until(whole)
    rounds = [each.round for each in federation.closed()]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(learnt) == len(set(learnt)), "nobody went back while the head was alive"
