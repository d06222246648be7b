"""Time of a round without training, against a bare client that moves and hashes the same bytes
over the same broker.

    python -m benchmarks.federation_rounds --nodes 5 --rounds 10 --turns 3

All that a round does besides training is in the first figure, from one round's end to the next:
messages, chunks, files, checks, sums, the average. The bare client publishes one blob to all nodes
and one from each node, in chunks of the same size, and hashes them. They take turns, since other
work on the machine comes and goes. Each node is a process. Processor time is a round's; memory is
the process's peak (VmHWM).
"""

import argparse
import hashlib
import json
import multiprocessing
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from safetensors.numpy import save_file

from benchmarks.node_scale import cpu_seconds, find_spec, mosquitto_of, peak_memory
from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode_any, encode
from broker_config.protocol.messages import Contribution, Finished, Hello, RoundState, Spec, Welcome
from broker_config.security.message_encryption import NodeEncryption
from broker_config.transfer.blob_transfer import BlobStore, BlobTransfer, Fetched
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix

CHUNK = 256 * 1024


class EmptyNode:
    """A node that sends back what it received, at once, but for one number:
    equal blobs would not be sent twice.
    """

    def __init__(self, endpoint: Endpoint, name: str, spec: Spec, folder: Path):
        self._spec, self._name, self._session = (
            spec,
            name,
            hashlib.sha256(name.encode()).hexdigest()[:16],
        )
        self._inbox: queue.Queue[object] = queue.Queue()
        self._encryption: NodeEncryption | None = None
        if spec.encryption == "group":
            self._encryption = NodeEncryption(spec.federation, spec.run, name, self._session)
            endpoint = endpoint.encrypting(self._encryption)
        self._mqtt = MqttClient(endpoint, name, inbox=self._inbox, persistent=True)
        self._store = BlobStore(folder)
        self._transfer = BlobTransfer(endpoint, spec.federation, name, self._store, self._inbox)

    def run(self) -> None:
        """Take part to the end."""
        federation, run = self._spec.federation, self._spec.run
        up = topics.up(federation, self._name)
        self._transfer.start()
        self._mqtt.subscribe(topics.round_state(federation), topics.down(federation, self._name))
        key = self._encryption.public if self._encryption else ""
        with self._mqtt:
            self._mqtt.publish(
                up, encode(Hello(session=self._session, run=run, software="benchmark", key=key))
            )
            while True:
                event = self._inbox.get()
                if isinstance(event, Delivery):
                    self._mqtt.ack(event)
                    state = decode_any(event.payload)
                    if (
                        isinstance(state, Welcome)
                        and self._encryption
                        and self._encryption.take_keys(state)
                    ):
                        self._mqtt.renew_subscriptions()
                        self._transfer.renew_subscriptions()
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
        digest, size = self._store.put(
            self._store.path(received.digest).read_bytes()[:-4] + number.tobytes()
        )
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
        message = Contribution(
            session=self._session, run=received.run, round=received.round, weight=0.7, blob=blob
        )
        self._mqtt.publish(up, encode(message))


def take_part(url: str, name: str, spec: Spec, folder: Path) -> None:
    """Be a node to the federation's end."""
    EmptyNode(Endpoint.parse(url), name, spec, folder).run()


def federate(
    broker: EmbeddedBroker, folder: Path, nodes: int, rounds: int, *options: str
) -> Iterator[dict[str, Any]]:
    """Run a federation that does not train; the events of its coordinator,
    whose state is `folder/coordinator`.

    The event before them, `Started`, names the processes: coordinator, a node, broker.
    """
    encoder = strip_prefix("encoder", initial_encoder("mobilenet_v2", "none", 0))
    save_file(encoder, folder / "initial.safetensors")
    coordinator = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "edge_node",
            "coordinate",
            broker.url,
            "--json",
            "--classes",
            "a,b",
            "--method",
            "afedcl",
            "--codec",
            "none",
            "--nodes",
            str(nodes),
            "--rounds",
            str(rounds),
            "--model",
            "mobilenet_v2",
            "--weights",
            str(folder / "initial.safetensors"),
            "--state",
            str(folder / "coordinator"),
            *options,
        ],
        stdout=subprocess.PIPE,
    )
    spec = find_spec(Endpoint.parse(broker.url), coordinator)
    context = multiprocessing.get_context("spawn")
    arguments = [(broker.url, f"node-{k}", spec, folder / f"node-{k}") for k in range(nodes)]
    processes = [context.Process(target=take_part, args=each) for each in arguments]
    for node in processes:
        node.start()
    yield {
        "event": "Started",
        "processes": [coordinator.pid, processes[0].pid, mosquitto_of(broker)],
    }
    assert coordinator.stdout is not None
    yield from map(json.loads, coordinator.stdout)
    for node in processes:
        node.join()


class Figures(NamedTuple):
    """What the rounds of one federation took, but the first.

    Processes: coordinator, a node, broker.
    """

    seconds: float  # of a round, from its predecessor's end to its own, the median
    blob: int  # bytes
    cpu: list[float]  # seconds of a round, by process
    peak: list[float]  # bytes, by process


def federation_rounds(broker: EmbeddedBroker, folder: Path, nodes: int, rounds: int) -> Figures:
    """Run a federation and measure its rounds."""
    closed, cpu, peak, blob = [], [], [], 0
    for event in federate(broker, folder, nodes, rounds):
        if event["event"] == "Started":
            processes = [Path(f"/proc/{each}") for each in event["processes"]]
        elif event["event"] == "Contribution":
            blob = event["bytes"]
        elif event["event"] == "RoundClosed":
            closed.append(time.perf_counter())
            cpu.append([cpu_seconds(each) for each in processes])
            peak = [peak_memory(each) for each in processes]
    taken = [later - earlier for earlier, later in pairwise(closed)]
    used = [(last - first) / len(taken) for first, last in zip(cpu[0], cpu[-1], strict=True)]
    return Figures(statistics.median(taken), blob, used, peak)


def bare_round(broker: EmbeddedBroker, nodes: int, rounds: int, size: int) -> float:
    """Median seconds for the same bytes: one blob to `nodes` clients and one from each,
    hashed, not written.
    """
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
    """Print both times, their ratio, and what the processes used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    ours, bare = [], []
    for _ in range(asked.turns):
        with (
            tempfile.TemporaryDirectory() as name,
            start_broker(Path(name) / "b", kind="mosquitto") as broker,
        ):
            ours.append(federation_rounds(broker, Path(name), asked.nodes, asked.rounds))
            bare.append(bare_round(broker, asked.nodes, asked.rounds, ours[-1].blob))
    ratios = [mine.seconds / theirs for mine, theirs in zip(ours, bare, strict=True)]
    print(
        f"{asked.nodes} nodes, {ours[0].blob / 1e6:.1f} MB a blob, medians of {asked.turns} x "
        f"{asked.rounds - 1} rounds"
    )
    print(
        f"round without training  {1000 * statistics.median(mine.seconds for mine in ours):7.0f} ms"
    )
    print(f"bare client             {1000 * statistics.median(bare):7.0f} ms")
    print(
        f"ratio                   {statistics.median(ratios):7.2f}  ({min(ratios):.2f} to "
        f"{max(ratios):.2f})"
    )
    for k, process in enumerate(("coordinator", "a node", "broker")):
        cpu, peak = (
            statistics.median(mine.cpu[k] for mine in ours),
            max(mine.peak[k] for mine in ours),
        )
        print(
            f"{process:12} {1000 * cpu:7.0f} ms of processor time a round, {peak / 1e6:5.0f} MB "
            "at most"
        )


if __name__ == "__main__":
    main()
