"""Time of a round without training, against a bare client that moves and hashes the same bytes over the same broker.

    python -m benchmarks.federation_rounds --nodes 5 --rounds 10

All that a round does besides training is in the first figure: messages, chunks, files, checks, sums, the average. The
bare client publishes one blob to all nodes and one from each node, in chunks of the same size, and hashes them.
"""

import argparse
import hashlib
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from safetensors.numpy import save_file

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import Delivery, MqttClient, read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode_any, encode
from broker_config.protocol.messages import Contribution, Finished, Hello, RoundState, Spec
from broker_config.transfer.blob_transfer import BlobStore, BlobTransfer, Fetched
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix

CHUNK = 256 * 1024


class EmptyNode(threading.Thread):
    """A node that sends back what it received, at once, but for one number: equal blobs would not be sent twice."""

    def __init__(self, url: str, name: str, spec: Spec, folder: Path):
        super().__init__(daemon=True)
        self._spec, self._name, self._session = spec, name, hashlib.sha256(name.encode()).hexdigest()[:16]
        self._inbox: queue.Queue[object] = queue.Queue()
        endpoint = Endpoint.parse(url)
        self._mqtt = MqttClient(endpoint, name, inbox=self._inbox, persistent=True)
        self._store = BlobStore(folder)
        self._transfer = BlobTransfer(endpoint, spec.federation, name, self._store, self._inbox)

    def run(self) -> None:
        """Take part to the end."""
        federation, run = self._spec.federation, self._spec.run
        up = topics.up(federation, self._name)
        self._transfer.start()
        with self._mqtt:
            self._mqtt.subscribe(topics.round_state(federation))
            self._mqtt.publish(up, encode(Hello(session=self._session, run=run, software="benchmark")))
            while True:
                event = self._inbox.get()
                if isinstance(event, Delivery):
                    self._mqtt.ack(event)
                    state = decode_any(event.payload)
                    if isinstance(state, RoundState) and state.status == "finished":
                        break
                    if isinstance(state, RoundState) and state.broadcast:
                        for old in self._store.digests() - {state.broadcast.digest}:
                            self._transfer.withdraw(old)
                            self._store.remove(old)
                        self._transfer.fetch(state.broadcast)
                elif isinstance(event, Fetched):
                    self._contribute(up, event)
            self._mqtt.publish(up, encode(Finished(session=self._session, run=run)))
            self._mqtt.flush(5)
        self._transfer.close()

    def _contribute(self, up: str, event: Fetched) -> None:
        received = event.manifest
        number = np.float32(received.round + int(self._name.rpartition("-")[2]) / 8)
        digest, size = self._store.put(self._store.path(received.digest).read_bytes()[:-4] + number.tobytes())
        self._transfer.offer(digest, self._transfer.chunk_size(CHUNK))
        blob = type(received)(
            federation=received.federation,
            run=received.run,
            round=received.round,
            node=self._name,
            digest=digest,
            size=size,
            chunk_size=self._transfer.chunk_size(CHUNK),
        )
        message = Contribution(session=self._session, run=received.run, round=received.round, weight=0.7, blob=blob)
        self._mqtt.publish(up, encode(message))


def federate(broker: EmbeddedBroker, folder: Path, nodes: int, rounds: int, *options: str) -> Iterator[dict[str, Any]]:
    """Run a federation that does not train; the events of its coordinator, whose state is `folder/coordinator`."""
    encoder = strip_prefix("encoder", initial_encoder("mobilenet_v2", "none", 0))
    save_file(encoder, folder / "initial.safetensors")
    coordinator = subprocess.Popen(
        [
            sys.executable, "-m", "edge.cli.main", "coordinate", broker.url, "--json", "--classes", "a,b",
            "--method", "afedcl", "--nodes", str(nodes), "--rounds", str(rounds),
            "--weights", str(folder / "initial.safetensors"), "--state", str(folder / "coordinator"), *options,
        ],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    spec = None
    while spec is None:
        found = read_retained(Endpoint.parse(broker.url), [topics.spec("default")], wait=1.0)
        spec = decode_any(found[topics.spec("default")]) if found else None
    assert isinstance(spec, Spec)
    threads = [EmptyNode(broker.url, f"node-{k}", spec, folder / f"node-{k}") for k in range(nodes)]
    for thread in threads:
        thread.start()
    assert coordinator.stdout is not None
    yield from map(json.loads, coordinator.stdout)


def federation_round(broker: EmbeddedBroker, folder: Path, nodes: int, rounds: int) -> tuple[float, int]:
    """Median seconds of a round after the first, and bytes of a blob."""
    events = [*federate(broker, folder, nodes, rounds)]
    seconds = [event["seconds"] for event in events if event["event"] == "RoundClosed"]
    blob = next(event["bytes"] for event in events if event["event"] == "Contribution")
    return statistics.median(seconds[1:]), int(blob)


def bare_round(broker: EmbeddedBroker, nodes: int, rounds: int, size: int) -> float:
    """Median seconds for the same bytes: one blob to `nodes` clients and one from each, hashed, not written."""
    blob = np.random.default_rng(0).bytes(size)
    chunks = [blob[start : start + CHUNK] for start in range(0, size, CHUNK)]
    arrived: queue.Queue[str] = queue.Queue()

    def client(name: str, topic: str) -> paho.Client:
        state = {"bytes": 0, "hash": hashlib.sha256()}

        def on_message(_client: object, _data: object, message: paho.MQTTMessage) -> None:
            state["hash"].update(message.payload)  # type: ignore[attr-defined]
            state["bytes"] += len(message.payload)  # type: ignore[operator]
            if state["bytes"] == size:
                arrived.put(state["hash"].hexdigest())  # type: ignore[attr-defined]
                state.update(bytes=0, hash=hashlib.sha256())

        made = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
        made.on_message = on_message
        made.connect("127.0.0.1", broker.port)
        made.subscribe(topic)
        made.loop_start()
        return made

    center = [client(f"bare-center-{k}", f"bare/up/{k}") for k in range(nodes)]
    outer = [client(f"bare-{k}", "bare/down") for k in range(nodes)]
    time.sleep(0.5)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for chunk in chunks:
            center[0].publish("bare/down", chunk)
        for _ in range(nodes):
            arrived.get(timeout=60)
        for k, node in enumerate(outer):
            for chunk in chunks:
                node.publish(f"bare/up/{k}", chunk)
        for _ in range(nodes):
            arrived.get(timeout=60)
        seconds.append(time.perf_counter() - started)
    for made in center + outer:
        made.disconnect()
        made.loop_stop()
    return statistics.median(seconds[1:])


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--broker", choices=("mosquitto", "amqtt"), default="mosquitto")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, start_broker(Path(name) / "b", kind=arguments.broker) as broker:
        ours, size = federation_round(broker, Path(name), arguments.nodes, arguments.rounds)
        bare = bare_round(broker, arguments.nodes, arguments.rounds, size)
    print(
        f"{arguments.nodes} nodes, {size / 1e6:.1f} MB a blob, {broker.kind}, medians of {arguments.rounds - 1} rounds"
    )
    print(f"round without training  {1000 * ours:7.0f} ms")
    print(f"bare client             {1000 * bare:7.0f} ms")
    print(f"ratio                   {ours / bare:7.2f}")


if __name__ == "__main__":
    main()
