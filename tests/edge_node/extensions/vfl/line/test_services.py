"""The vertical model in effect: services as separate processes, with kits, over a real broker."""

import json
import queue
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.frames import Embedded, encode_frame
from tests.support.plants import start
from tests.support.provisioned_federation import Guarded, guarded
from tests.support.vfl_models import COLUMNS, RUN, TrainedRun, rows
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow  # the processes of a whole site
DEADLINE = 10.0
SENSORS = tuple(COLUMNS)


class Watch:
    """A monitor of the head's predictions."""

    def __init__(self, broker: Guarded):
        self._inbox: queue.Queue[Any] = queue.Queue()
        self.mqtt = MqttClient(
            Endpoint.from_kit(broker.kits["monitor"]), "watch", inbox=self._inbox, persistent=False
        )
        self.mqtt.subscribe(vfl_topics.predictions("steel"))
        self.mqtt.open()
        assert self.mqtt.await_subscription(60)
        self.heard: list[dict[str, Any]] = []

    def until(
        self, met: Callable[[dict[str, Any]], bool], seconds: float = PATIENCE
    ) -> dict[str, Any]:
        """The first prediction of which this is true, heard already or not."""
        deadline = time.monotonic() + seconds
        for each in self.heard:
            if met(each):
                return each
        while time.monotonic() < deadline:
            with suppress(queue.Empty):
                event = self._inbox.get(timeout=0.1)
                if isinstance(event, Delivery):
                    self.heard.append(json.loads(event.payload))
                    if met(self.heard[-1]):
                        return self.heard[-1]
        raise AssertionError(self.heard[-5:])

    def final(self, product: str) -> dict[str, Any]:
        return self.until(lambda each: (each["product"], each["answer"]) == (product, "final"))


class Site:
    """The services of a vertical federation, and what they read and write."""

    def __init__(self, folder: Path, broker: Guarded):
        self.folder, self.broker = folder, broker
        self.learnt = TrainedRun(reading="expectation")
        self.bundles = self.learnt.write(folder / "bundles", broker.kits)
        self.output = folder / "predictions.jsonl"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name, columns in COLUMNS.items():
            (folder / f"{name}.csv").write_text(
                f"product,{','.join(columns)}\nold,{','.join('1' * len(columns))}\n"
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def start(self, name: str, deadline: float = DEADLINE) -> None:
        """Start a member's service."""
        special: list[object] = ["--output", self.output, "--deadline", deadline]
        if name != "coordinator":
            special = ["--data", self.folder / f"{name}.csv"]
        self._running[name] = self._service(name, self.folder / f"{name}.log", special)

    def start_twice(self, name: str) -> list[subprocess.Popen[bytes]]:
        """Two services of one sensor at a time."""
        special = ["--data", self.folder / f"{name}.csv"]
        return [
            self._service(name, self.folder / f"twice-{index}.log", special) for index in (0, 1)
        ]

    def _service(self, name: str, log: Path, special: list[object]) -> subprocess.Popen[bytes]:
        return start(
            "vfl",
            "serve",
            self.bundles[name],
            "--kit",
            self.broker.folder / "kits" / f"{name}.kit",
            "--state",
            self.folder / "memory",
            *special,
            log=log,
            EDGE_NODE_PASSPHRASE=self.broker.members.passphrase(name),
        )

    def ready(self, name: str) -> None:
        self.wait(lambda: "ready" in self.log(name), self._running[name])

    def end(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.terminate()
        assert process.wait(60) == 0, self.log(name)

    def wait(self, met: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
        wait_until(
            met,
            meanwhile=lambda: process is None or process.poll() is None,
            said=lambda: self.folder,
        )

    def append(self, name: str, products: list[str], raw: dict[str, np.ndarray]) -> None:
        with (self.folder / f"{name}.csv").open("a") as file:
            for product, row in zip(products, raw[name], strict=True):
                file.write(f"{product},{','.join(map(str, row.tolist()))}\n")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """All services of a vertical federation."""
    # pytest's are closed to mosquitto
    with tempfile.TemporaryDirectory() as passable, ExitStack() as running:
        folder = Path(passable)
        folder.chmod(0o711)
        broker = running.enter_context(guarded(folder / "federation", nodes=SENSORS))
        found = Site(folder, broker)
        running.callback(found.end)
        for name in found.bundles:
            found.start(name)
        for name in found.bundles:
            found.ready(name)
        yield found


@pytest.fixture
def watch(site: Site) -> Iterator[Watch]:
    found = Watch(site.broker)
    with suppress(queue.Empty):
        found._inbox.get_nowait()
    yield found
    found.mqtt.close()


@pytest.fixture
def press(site: Site) -> Iterator[MqttClient]:
    """A process that says whatever it likes with the kit of press."""
    mqtt = MqttClient(
        Endpoint.from_kit(site.broker.kits["press"]),
        "press-liar",
        inbox=queue.Queue(),
        persistent=False,
    )
    with mqtt:
        yield mqtt


def test_products_are_predicted_as_their_rows_appear_and_as_torch_would(
    site: Site, watch: Watch
) -> None:
    products, (raw, _) = [f"a-{number}" for number in range(20)], rows(20, seed=11)
    for name in ("press", "oven"):
        site.append(name, products, raw)
    partial = watch.until(lambda each: each["product"] == "a-7" and len(each["present"]) == 2)
    assert (partial["answer"], partial["absent"]) == ("partial", ["scale"])
    site.append("scale", products, raw)
    expected = site.learnt.predicted(raw)
    for number, product in enumerate(products):
        final = watch.final(product)
        assert final["class"] == str(expected[number].argmax())
        assert final["probability"] == pytest.approx(expected[number].max(), abs=1e-5)
        assert final["expectation"] == pytest.approx(expected[number] @ np.arange(4), abs=1e-4)
        assert (final["present"], final["absent"]) == ([*SENSORS], [])
        assert final["latency_ms"] > 0
        assert (final["run"], final["round"]) == (RUN, 12)
    # a line each, none twice
    site.wait(lambda: site.output.read_text().count('"a-') == len(products))
    late = Watch(site.broker)
    assert late.until(lambda each: True)["answer"] == "final"  # what the broker retains
    late.mqtt.close()


def test_what_a_sensor_never_says_does_not_hold_a_product_up(site: Site, watch: Watch) -> None:
    raw, _ = rows(1, seed=12)
    for name in ("press", "scale"):
        site.append(name, ["b-1"], raw)
    final = watch.final("b-1")
    assert final["absent"] == ["oven"]
    site.append("oven", ["b-1"], raw)  # too late
    site.wait(lambda: "of oven: late" in site.log("coordinator"))


def test_bad_embeddings_are_named_and_left_out_and_the_federation_goes_on(
    site: Site, press: MqttClient
) -> None:
    topic = vfl_topics.products("steel", "press")
    good = np.ones(16, np.float32)

    def say(product: str, embedding: bytes, run: str = RUN) -> None:
        press.publish(
            topic, encode_frame(Embedded(run=run, round=3, product=product, embedding=embedding))
        )

    say("c-1", good[:5].tobytes())
    say("c-2", good.tobytes()[:-1])
    say("c-3", np.full(16, np.nan, np.float32).tobytes())
    say("c-4", good.tobytes(), run="cd" * 8)
    press.publish(topic, b"\x93nonsense")
    press.publish(vfl_topics.products("steel", "oven"), b"no right to say so")
    for number in range(1500):
        say(f"c-invented-{number}", good.tobytes())
        if number % 400 == 0:
            assert press.flush(60)
    assert press.flush(60)
    raw, _ = rows(1, seed=13)
    for name in SENSORS:
        site.append(name, ["c-5"], raw)
    # What the head writes: of so many predictions a broker keeps some from a watcher that is slow.
    site.wait(lambda: '"c-5"' in site.output.read_text().rpartition("\n")[0])
    written = [
        json.loads(line)
        for line in site.output.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    assert [each["absent"] for each in written if each["product"] == "c-5"] == [[]]
    log = site.log("coordinator")
    for reason in (
        "of the wrong length",
        "no embedding",
        "not finite",
        "of another run",
        "unreadable",
    ):
        assert log.count(f"of press: {reason}") == 1, log
    assert not any(each["product"] in ("c-1", "c-2", "c-3", "c-4") for each in written)


def test_newer_models_are_taken_up_while_serving_and_older_embeddings_get_an_older_one(
    site: Site, watch: Watch, press: MqttClient
) -> None:
    site.learnt.write(site.folder / "bundles", site.broker.kits, round_=500)
    raw, _ = rows(1, seed=14)
    for number in range(100):
        for name in SENSORS:
            site.append(name, [f"d-{number}"], raw)
        final = watch.final(f"d-{number}")
        if (final["round"], final["rounds"]) == (500, [500, 500, 500]):
            break
    else:
        raise AssertionError(final)
    for round_ in (12, 499):
        frame = Embedded(
            run=RUN,
            round=round_,
            product=f"d-of-{round_}",
            embedding=np.ones(16, np.float32).tobytes(),
        )
        press.publish(vfl_topics.products("steel", "press"), encode_frame(frame))
    assert watch.final("d-of-12")["round"] == 12
    assert watch.final("d-of-499")["round"] == 500


def test_a_bundle_that_somebody_else_has_written_is_not_taken_up(site: Site, watch: Watch) -> None:
    before = site.learnt.write(site.folder / "kept", site.broker.kits, round_=600)["coordinator"]
    forged = site.learnt.write(site.folder / "forged", round_=700)["coordinator"]
    served = site.bundles["coordinator"]
    served.rename(site.folder / "away")
    forged.rename(served)
    site.wait(lambda: "is not served" in site.log("coordinator"))
    raw, _ = rows(1, seed=15)
    for name in SENSORS:
        site.append(name, ["e-1"], raw)
    assert watch.final("e-1")["round"] in (12, 500)
    served.rename(forged)
    before.rename(served)


def test_what_came_while_the_head_was_away_is_predicted_and_what_is_open_at_its_end_is_answered(
    site: Site, watch: Watch
) -> None:
    site.stop("coordinator")
    raw, _ = rows(1, seed=16)
    site.append("press", ["f-1"], raw)
    site.start("coordinator", deadline=600)
    assert watch.until(lambda each: each["product"] == "f-1")["answer"] == "partial"
    site.stop("coordinator")
    assert watch.final("f-1")["absent"] == ["oven", "scale"]
    assert json.loads(site.output.read_text().splitlines()[-1])["product"] == "f-1"
    site.append("oven", ["f-1"], raw)  # waits at the broker
    site.start("coordinator")
    site.wait(lambda: "of oven: late" in site.log("coordinator"))  # no second answer


def test_of_two_services_of_one_member_one_gives_way_and_says_why(site: Site) -> None:
    site.stop("press")
    first, second = site.start_twice("press")
    site.wait(lambda: first.poll() is not None or second.poll() is not None)
    loser, winner = (first, second) if first.poll() is not None else (second, first)
    assert loser.returncode == 1
    assert any(
        "connected as press" in (site.folder / f"twice-{index}.log").read_text() for index in (0, 1)
    )
    assert winner.poll() is None
    winner.terminate()
    assert winner.wait(60) == 0
