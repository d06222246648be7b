"""What a broker brings back after it was killed is old: wills are forgotten, messages come late."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt import client
from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.messages import REVISION, Hello, Presence
from tests.support.plants import CLASSES
from trainer import progress
from trainer.federation.presence import check_name_free, check_no_server
from trainer.federation.server import connection, membership
from trainer.federation.server.coordinator import process as coordinator
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Request, draft

_OLD, _OTHER = "00000000000000aa", "00000000000000bb"


@pytest.fixture
def mqtt(mosquitto: EmbeddedBroker) -> Iterator[MqttClient]:
    """Somebody who can say anything."""
    with MqttClient(
        Endpoint.parse(mosquitto.url), "tester", inbox=queue.Queue(), persistent=False
    ) as mqtt:
        yield mqtt


def test_what_is_left_of_a_process_that_has_gone_takes_nobodys_name(
    mosquitto: EmbeddedBroker, mqtt: MqttClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker restored a presence that is several processes old,
    and has no will that would revoke it.
    """
    monkeypatch.setattr(client, "ANSWER", 0.3)
    endpoint = Endpoint.parse(mosquitto.url)
    for name in ("a", topics.COORDINATOR):
        mqtt.publish(
            topics.presence("default", name),
            encode(Presence(session=_OLD, online=True)),
            retain=True,
        )
    mqtt.flush(60)
    check_name_free(endpoint, "default", "a", tmp_path / "state")
    check_no_server(endpoint, "default")


def test_a_node_whose_hello_came_after_its_end_is_missed_at_the_next_roll_call(
    mosquitto: EmbeddedBroker, mqtt: MqttClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connection, membership):
        monkeypatch.setattr(module, "GRACE", 0.5)
    lost, over = queue.Queue[str](), threading.Event()

    def report(event: object) -> None:
        if isinstance(event, progress.NodeLost):
            lost.put(event.node)

    spec, broadcast = draft(
        Request(model="small", size=32), federation="default", classes=CLASSES, nodes=2
    )
    endpoint = Endpoint.parse(mosquitto.url)

    def coordinating() -> None:
        with Ledger(tmp_path / "coordinator") as ledger:
            coordinator.coordinate(ledger, spec, broadcast, endpoint, report, stop=over.is_set)

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(coordinating)
        try:
            with Answering(endpoint, spec.run) as answering:
                answering.called.get(timeout=60)
                hello = Hello(
                    session=_OLD, run=spec.run, software="", identity=_OTHER, revision=REVISION
                )
                mqtt.publish(topics.up("default", "gone"), encode(hello))
                assert lost.get(timeout=60) == "gone"
                for _ in range(4):
                    answering.called.get(timeout=60)
        finally:
            over.set()
    assert job.exception() is None
    assert lost.empty()  # who answers is not missed, however often it is called


class Answering:
    """A node that answers each roll call, and does nothing else."""

    def __init__(self, endpoint: Endpoint, run: str):
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._hello = encode(
            Hello(session=_OTHER, run=run, software="", identity=_OLD, revision=REVISION)
        )
        self._mqtt = MqttClient(endpoint, "answering", inbox=self._inbox, persistent=False)
        self.called: queue.Queue[None] = queue.Queue()
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> Self:
        self._mqtt.open()
        self._mqtt.subscribe(topics.presence("default", topics.COORDINATOR))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._mqtt.close()

    def _answer(self) -> None:
        while (event := self._inbox.get()) is not None:
            if isinstance(event, Delivery):
                self._mqtt.publish(topics.up("default", "there"), self._hello)
                self.called.put(None)
