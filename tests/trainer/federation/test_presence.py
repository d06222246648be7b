"""A broker that is away or has no room, and a name that is taken.

(Who is connected: test_broker_recovery.py.)
"""

import queue
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import Claim, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.errors import BrokerAwayError, BrokerError, BrokerFullError, UsageError
from tests.support.frame_mutation import small_encoder
from tests.support.manual_clock import Clock
from tests.support.plants import CLASSES, FEDERATION, draw, start, wait_for
from tests.support.ports import free_port
from tests.support.provisioned_federation import Guarded, make
from trainer import progress
from trainer.federation import presence
from trainer.federation.presence import check_name_free, is_connected
from trainer.federation.server.coordinator.process import coordinate
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Request, draft


@pytest.fixture
def narrow() -> Iterator[Guarded]:
    """A provisioned broker with room for four connections."""
    # all users can reach it: mosquitto is one of its own
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        broker = Guarded(make(Path(folder) / "steel", port=free_port()))
        settings = broker.folder / "broker" / "mosquitto.conf"
        settings.write_text(
            settings.read_text().replace("max_connections 1000", "max_connections 4")
        )
        broker.start()
        yield broker
        broker.stop()


def hold(broker: Guarded, stack: ExitStack, count: int) -> None:
    """A member that connects so many times."""
    endpoint = Endpoint.from_kit(broker.kits["plant-a"])
    for number in range(count):
        held = Client(CallbackAPIVersion.VERSION2, f"held-{number}")
        held.tls_set_context(endpoint.tls_context())
        connected = threading.Event()
        held.on_connect = lambda *_, connected=connected: connected.set()
        held.connect(endpoint.host, endpoint.port)
        held.loop_start()
        stack.callback(held.loop_stop)
        stack.callback(held.disconnect)
        assert connected.wait(60)


def test_a_member_that_takes_all_connections_ends_nobody(narrow: Guarded, tmp_path: Path) -> None:
    endpoint = Endpoint.from_kit(narrow.kits["coordinator"])
    spec, broadcast = draft(
        Request("fedavg", model="small", size=32),
        federation="steel",
        classes=CLASSES,
        nodes=2,
        encoder=small_encoder(),
    )
    told: queue.Queue[progress.AnyEvent] = queue.Queue()
    stopped = threading.Event()

    def part() -> None:
        with Ledger(tmp_path / "state") as ledger:
            coordinate(ledger, spec, broadcast, endpoint, told.put, stop=stopped.is_set)

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        hold(narrow, stack, 4)
        with pytest.raises(BrokerFullError, match="connections"):
            is_connected(endpoint, "steel", "plant-a")
        ending = pool.submit(part)
        said = told.get(timeout=60)
        assert isinstance(said, progress.Note)
        assert "waiting for room" in said.text
        stack.close()
        while not isinstance(told.get(timeout=60), progress.Gathering):
            pass
        stopped.set()
        ending.result(60)


def test_whose_name_is_taken_hears_what_it_can_do_with_a_kit_or_without(
    narrow: Guarded, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    topic = topics.presence("steel", "plant-a")
    remedies = []
    for endpoint in (Endpoint.from_kit(narrow.kits["plant-a"]), Endpoint.parse(mosquitto.url)):
        with MqttClient(
            endpoint, "", inbox=queue.Queue(), persistent=False, claim=Claim.draw(topic)
        ) as other:
            other.publish_presence(online=True)
            assert other.flush(60)
            with pytest.raises(UsageError, match="'plant-a'") as caught:
                check_name_free(endpoint, "steel", "plant-a", tmp_path / "none")
            remedies.append(caught.value.remedy.rpartition(", or ")[2])
    assert remedies == [
        "take a kit of another name, which edge-node provision steel --nodes NAME makes",
        "choose another --name",
    ]


@pytest.mark.slow
def test_a_broker_that_comes_up_later_is_waited_for(tmp_path: Path) -> None:
    """By coordinator and node, as when one machine starts all three; and not for ever."""
    port, logs = free_port(), [tmp_path / "coordinator", tmp_path / "node"]
    images = draw(tmp_path / "images", per_class=2, seed=3)
    broker = f"mqtt://127.0.0.1:{port}"
    coordinate = (
        "coordinate",
        broker,
        "--nodes",
        2,
        "--classes",
        ",".join(CLASSES),
        "--state",
        tmp_path / "state",
    )
    both = [
        start(*coordinate, *FEDERATION, log=logs[0]),
        start(
            "join", broker, "--name", "a", "--data", images, "--state", tmp_path / "a", log=logs[1]
        ),
    ]
    for log in logs:
        wait_for(log, "connection refused; trying again for 60 s: start the broker")
    with start_broker(tmp_path / "broker", port=port):
        wait_for(logs[0], "a joined")
        for process in both:
            process.terminate()
        for process in both:
            process.wait(60)
    for log in logs:
        assert log.read_text().count("trying again for") == 1


def test_a_broker_that_does_not_come_is_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = Clock()
    monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=clock, sleep=lambda _: None))
    patience = presence.Patience(said.append, wait=30.0, pause=0.0)
    away = BrokerAwayError("nothing listens", "start it")

    def wait() -> None:
        while True:
            patience.bear(away)
            clock.now += 1.0

    with pytest.raises(BrokerAwayError):
        wait()
    patience.renew()
    patience.bear(away)
    assert said == ["nothing listens; trying again for 30 s: start it"] * 2
    assert clock.now == 30.0
    with pytest.raises(BrokerError, match="not let in"):
        patience.bear(BrokerError("not let in"))


def test_a_coordinator_that_is_ended_before_its_run_began_suspends_nothing(
    narrow: Guarded, tmp_path: Path
) -> None:
    log, kit = tmp_path / "log", narrow.folder / "kits" / "coordinator.kit"
    with ExitStack() as stack:
        hold(narrow, stack, 4)
        coordinator = start(
            "coordinate",
            "--kit",
            kit,
            "--classes",
            ",".join(CLASSES),
            "--state",
            tmp_path / "state",
            "--new",
            *FEDERATION,
            log=log,
            EDGE_NODE_PASSPHRASE=narrow.members.passphrase("coordinator"),
        )
        wait_for(log, "waiting for room")
        coordinator.terminate()
        assert coordinator.wait(60) == 130
    assert "before the run began" in log.read_text()
    assert "suspended" not in log.read_text()
