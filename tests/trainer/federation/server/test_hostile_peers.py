"""A peer that breaks the protocol is named and left out; the round goes on without it."""

import hashlib
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paho.mqtt.enums import MQTTProtocolVersion
from safetensors.numpy import save

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode, decode_any, encode, encode_chunk, encoded_size
from broker_config.protocol.messages import (
    AnyMessage,
    Contribution,
    Hello,
    Manifest,
    Refusal,
    RoundState,
    Want,
)
from tests.support.foreign_node import ForeignNode, Tensors
from tests.support.frame_mutation import small_encoder
from tests.support.plants import CLASSES, draw, run
from tests.support.waiting import PATIENCE
from trainer import progress
from trainer.federation.server.coordinator.process import coordinate
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Participation, Request, draft
from trainer.models.named_tensors import select

V5 = MQTTProtocolVersion.MQTTv5


def first(received: Tensors) -> str:
    return min(received)


def poisoned(node: "Hostile", received: Tensors) -> None:
    received[first(received)].flat[0] = np.nan
    node.send(received)


def diverged(node: "Hostile", received: Tensors) -> None:
    received[first(received)].flat[0] = 1e20
    node.send(received)


def misshapen(node: "Hostile", received: Tensors) -> None:
    received[first(received)] = np.zeros((1, 1), np.float32)
    node.send(received)


def incomplete(node: "Hostile", received: Tensors) -> None:
    del received[first(received)]
    node.send(received)


def wrong_type(node: "Hostile", received: Tensors) -> None:
    received[first(received)] = received[first(received)].astype(np.float64)
    node.send(received)


def truncated(node: "Hostile", received: Tensors) -> None:
    node.send(received, cut=100)


def another_blob(node: "Hostile", received: Tensors) -> None:
    node.send(received, manifest={"digest": "0" * 64})


def terabytes(node: "Hostile", received: Tensors) -> None:
    node.send(received, manifest={"size": 1 << 40})


def replayed(node: "Hostile", received: Tensors) -> None:
    node.send(received, manifest={"run": "f" * 16})


def without_blob(node: "Hostile", received: Tensors) -> None:
    node.send(received, blob=None)


def impossible_weight(node: "Hostile", received: Tensors) -> None:
    node.send(received, weight=-1.0)


def from_the_future(node: "Hostile", received: Tensors) -> None:
    node.send(received, round=2)


def garbage(node: "Hostile", received: Tensors) -> None:
    node.control.publish(node.topic("nodes", node.name, "up"), b"\xff\x00{", 1)


def verbose(node: "Hostile", received: Tensors) -> None:
    """What is wrong with it is as long as itself."""
    node.tell("up", type="x" * 102_300)


def verbose_tensors(node: "Hostile", received: Tensors) -> None:
    largest = max(received, key=lambda name: received[name].size)
    received[largest] = received["e" * 140_000] = np.zeros(0, np.float32)
    node.send(received)


def wrong_direction(node: "Hostile", received: Tensors) -> None:
    node.tell("up", type="Accepted", run=node.spec["run"], round=1)


DEEDS: dict[Callable[["Hostile", Tensors], None], str] = {
    poisoned: "NaN|finite",
    diverged: "diverged",
    misshapen: "shape",
    incomplete: "missing|lacks|names",
    wrong_type: "float32|F64",
    truncated: "cannot be read|truncated|safetensors|header|incomplete",
    another_blob: "digest",
    terabytes: "promises",
    replayed: "another federation, run, round or node",
    without_blob: "number of blobs",
    impossible_weight: "cannot be -1",
    from_the_future: "not open",
    garbage: "cannot be read",
    verbose: "cannot be read",
    verbose_tensors: "tensors too many",
    wrong_direction: "does not send Accepted",
}


class Hostile(ForeignNode):
    """Does its deed when it is asked to contribute."""

    def __init__(self, port: int, deed: Callable[["Hostile", Tensors], None]):
        super().__init__(port, "hostile", V5, weight=5, shift=0)
        self.deed = deed

    def run(self, dies_in: int = -1) -> Tensors:
        try:
            return super().run(dies_in)
        finally:  # its connections must not fight with those of the next test's
            for client in (self.control, self.data):
                client.disconnect()
                client.loop_stop()

    def contribute(self, received: Tensors) -> None:
        self.round = self.state["round"]
        self.deed(self, received)

    def send(
        self, tensors: Tensors, manifest: dict[str, Any] | None = None, cut: int = 0, **changes: Any
    ) -> None:
        """A contribution of these tensors, with some things not as they should be."""
        blob = save(tensors)
        blob = blob[: len(blob) - cut]
        digest = hashlib.sha256(blob).hexdigest()
        told = (
            self.state["broadcast"]
            | {"node": self.name, "digest": digest, "size": len(blob)}
            | (manifest or {})
        )
        self.offered = {told["digest"]: blob}
        message = {
            "type": "Contribution",
            "run": self.spec["run"],
            "round": self.round,
            "weight": 5,
            "blob": told,
        }
        self.tell("up", **message | changes)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One broker for all."""
    with start_broker(tmp_path_factory.mktemp("broker") / "state") as running:
        yield running


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_a_hostile_peer_is_named_and_the_round_goes_on(
    deed: Callable[[Hostile, Tensors], None], broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """An honest node and a hostile one, quorum one: the honest one finishes,
    the hostile one is told why it may not.
    """
    request = Request("fedavg", model="small", size=32, rounds=2, seed=7)
    spec, first = draft(
        request,
        federation="default",
        classes=CLASSES,
        nodes=2,
        participation=Participation(quorum=1, sample=2),
        encoder=small_encoder(),
    )
    told: list[progress.AnyEvent] = []
    gathering, patience = threading.Event(), time.monotonic() + PATIENCE

    def tell(event: progress.AnyEvent) -> None:
        told.append(event)
        gathering.set()

    def coordinating() -> object:
        with Ledger(tmp_path / "state") as ledger:
            return coordinate(
                ledger,
                spec,
                first,
                Endpoint.parse(broker.url),
                tell,
                stop=lambda: time.monotonic() > patience,
            )

    with ThreadPoolExecutor(2) as pool:
        outcome = pool.submit(coordinating)
        assert gathering.wait(60)
        result = pool.submit(ForeignNode(broker.port, "honest", V5, weight=10, shift=0.5).run)
        with pytest.raises(AssertionError, match="Refusal") as refusal:
            Hostile(broker.port, deed).run()
    assert outcome.result() is not None
    assert result.result()
    (refused,) = [event for event in told if isinstance(event, progress.NodeRefused)]
    assert refused.node == "hostile"
    assert re.search(DEEDS[deed], refused.reason), refused
    assert refused.reason[:40] in str(refusal.value)
    closed = [event.contributors for event in told if isinstance(event, progress.RoundClosed)]
    assert closed == [["honest"], ["honest"]]


@pytest.mark.slow
def test_a_node_does_not_fetch_terabytes(broker: EmbeddedBroker, tmp_path: Path) -> None:
    spec, _ = draft(
        Request("fedavg", model="small"),
        federation="false",
        classes=CLASSES,
        nodes=1,
        encoder=small_encoder(),
    )
    manifest = Manifest(
        federation="false",
        run=spec.run,
        round=1,
        node="coordinator",
        digest="0" * 64,
        size=1 << 40,
        chunk_size=1 << 20,
    )
    state = RoundState(run=spec.run, round=1, status="open", broadcast=manifest)
    with MqttClient(
        Endpoint.parse(broker.url), "false", inbox=queue.Queue(), persistent=False
    ) as mqtt:
        mqtt.publish(topics.spec("false"), encode(spec), retain=True)
        mqtt.publish(topics.round_state("false"), encode(state), retain=True)
        mqtt.flush(60)
    images = draw(tmp_path / "images", 4, seed=1)
    done = run(
        "join",
        broker.url,
        "--federation",
        "false",
        "--name",
        "a",
        "--data",
        images,
        "--state",
        tmp_path / "a",
    )
    assert done.returncode == 1
    assert "promises 1099511627776 bytes" in done.stderr


def test_a_node_that_offers_one_blob_after_the_other_fills_no_disk(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    """What has arrived when its node has offered another is of no use, and does not stay."""
    spec, broadcast = draft(
        Request("fedavg", {}, "small", size=32, training={"local_epochs": 1}, rounds=1),
        federation="filled",
        classes=CLASSES,
        nodes=2,
        encoder=small_encoder(),
    )
    size, chunk = encoded_size(select(spec.tensors, spec.sends)), 1 << 20
    inbox: queue.Queue[Any] = queue.Queue()
    stopped = threading.Event()

    def part() -> None:
        endpoint = Endpoint.parse(mosquitto.url)
        with Ledger(tmp_path) as ledger:
            coordinate(ledger, spec, broadcast, endpoint, progress.ignore, stop=stopped.is_set)

    with (
        ThreadPoolExecutor(1) as pool,
        MqttClient(
            Endpoint.parse(mosquitto.url), "filler", inbox=inbox, persistent=False
        ) as filler,
    ):
        ending = pool.submit(part)
        filler.subscribe(
            topics.want("filled", "filler", "+"),
            topics.presence("filled", "coordinator"),
            topics.down("filled", "filler"),
        )
        offered: dict[str, bytes] = {}

        def say(message: AnyMessage) -> None:
            filler.publish(topics.up("filled", "filler"), encode(message))

        def offer(session: str) -> None:
            digest = hashlib.sha256(data := secrets.token_bytes(size)).hexdigest()
            offered[digest] = data
            blob = Manifest(
                federation="filled",
                run=spec.run,
                round=1,
                node="filler",
                digest=digest,
                size=size,
                chunk_size=chunk,
            )
            say(Contribution(session=session, run=spec.run, round=1, weight=9, blob=blob))

        def fill(session: str) -> None:
            """Until one is looked at after all, which ends this session of ours."""
            say(Hello(session=session, run=spec.run, software=""))
            offer(session)
            while len(offered) < 40:
                event = inbox.get(timeout=60)
                if isinstance(event, Delivery) and event.topic == topics.down("filled", "filler"):
                    message = decode_any(event.payload)
                    if isinstance(message, Refusal) and message.session == session:
                        return
                if isinstance(event, Delivery) and "/want/" in event.topic:
                    digest = decode(event.payload, Want).digest
                    if data := offered.get(digest, b""):
                        offered[digest] = b""
                        filler.publish(
                            topics.chunks("filled", "filler", digest, chunk),
                            encode_chunk(0, data),
                            qos=0,
                        )
                        offer(session)

        while not isinstance(inbox.get(timeout=60), Delivery):
            pass
        filler.publish(
            topics.up("filled", "other"), encode(Hello(session="d" * 16, run=spec.run, software=""))
        )
        for session in ("a" * 16, "b" * 16, "c" * 16):
            fill(session)
        stopped.set()
        ending.result(60)
        kept = [path for path in (tmp_path / "blobs").iterdir() if path.is_file()]
    # the broadcast, what counts or was refused last, and what was about to be looked at
    assert len(kept) <= 3
