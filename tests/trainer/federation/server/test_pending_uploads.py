"""Contributions that wait for their turn cost the coordinator nothing; a few are under way."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode, encode, encoded_size
from broker_config.protocol.messages import Contribution, Hello, Manifest, RoundState
from broker_config.transfer.blob_transfer import MAX_DOWNLOADS, BlobTransfer
from tests.support.frame_mutation import small_encoder
from tests.support.plants import CLASSES
from tests.support.waiting import wait_until
from trainer import progress
from trainer.federation.server.coordinator.process import coordinate
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Request, draft
from trainer.models.named_tensors import select

NODES = [f"node-{number}" for number in range(5 * MAX_DOWNLOADS)]
SESSION = "a" * 16


def test_after_an_event_the_coordinator_looks_at_uploads_under_way_and_not_at_all_that_wait(
    mosquitto: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the work of a round grows with the square of its nodes."""
    spec, broadcast = draft(
        Request("fedavg", {}, "small", size=32, rounds=1),
        federation="many",
        classes=CLASSES,
        nodes=len(NODES),
        encoder=small_encoder(),
    )
    endpoint = Endpoint.parse(mosquitto.url)
    stopped = threading.Event()
    looks = [0]  # in each pass of the coordinator's loop, which asks whether to stop
    sending: set[str] = set()

    def stop() -> bool:
        looks.append(0)
        return stopped.is_set()

    def report(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.Activity) and event.what == "sending":
            sending.add(event.node)

    received = BlobTransfer.received

    def counted(transfer: BlobTransfer, digest: str) -> int:
        looks[-1] += 1
        return received(transfer, digest)

    monkeypatch.setattr(BlobTransfer, "received", counted)

    def part() -> None:
        with Ledger(tmp_path) as ledger:
            coordinate(ledger, spec, broadcast, endpoint, report, stop=stop)

    def contribution(node: str, number: int) -> Contribution:
        """Announce a blob whose chunks never come."""
        blob = Manifest(
            federation="many",
            run=spec.run,
            round=1,
            node=node,
            digest=f"{number:064x}",
            size=encoded_size(select(spec.tensors, spec.sends)),
            chunk_size=1024,
        )
        return Contribution(session=SESSION, run=spec.run, round=1, weight=9, blob=blob)

    inbox: queue.Queue[Any] = queue.Queue()
    with (
        ThreadPoolExecutor(1) as pool,
        MqttClient(endpoint, "", inbox=inbox, persistent=False) as nodes,
    ):
        ending = pool.submit(part)
        nodes.subscribe(topics.round_state("many"), topics.presence("many", topics.COORDINATOR))
        while not is_about(topics.presence("many", topics.COORDINATOR), inbox.get(timeout=60)):
            pass
        for node in NODES:
            nodes.publish(
                topics.up("many", node), encode(Hello(session=SESSION, run=spec.run, software=""))
            )
        while not is_open(inbox.get(timeout=60)):
            pass
        for number, node in enumerate(NODES):
            nodes.publish(topics.up("many", node), encode(contribution(node, number)))
        wait_until(lambda: sending == {*NODES})
        stopped.set()
        ending.result(60)
    assert max(looks) <= MAX_DOWNLOADS + 1  # and one that has just been announced


def is_about(topic: str, event: object) -> bool:
    return isinstance(event, Delivery) and event.topic == topic


def is_open(event: object) -> bool:
    is_state = is_about(topics.round_state("many"), event)
    return (
        is_state
        and isinstance(event, Delivery)
        and decode(event.payload, RoundState).status == "open"
    )
