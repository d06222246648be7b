"""Many nodes that train nothing, on threads of a few processes:
the load of a fleet on a coordinator.

They speak the real protocol through the real MQTT client and blob transfer. Each offers a blob of
its own in each round; on disk are a few, and a node shows one of them with a number of its own at
the end.
"""

import hashlib
import json
import multiprocessing
import queue
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from broker_config.mqtt.client import Claim, Connected, Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode_any, encode, encode_tensors
from broker_config.protocol.messages import (
    Accepted,
    Contribution,
    Finished,
    Hello,
    Manifest,
    RoundState,
    Spec,
)
from broker_config.transfer.blob_transfer import BlobStore, BlobTransfer, Fetched
from trainer.models.named_tensors import Arrays, select
from trainer.seeding import generator

CHUNK = 256 * 1024  # bytes
A_PROCESS = 50  # nodes: paho's select takes file descriptors below 1024 only
BLOBS = 4  # different ones on disk
_START = 0.05  # standard deviation of the drawn values


class Facts(NamedTuple):
    """What the nodes of one process saw. Times are the machine's monotonic clock, seconds."""

    fetched: list[tuple[int, float]]  # round that a broadcast begins, when a node had it
    accepted: list[tuple[int, float]]  # round, when a node's contribution was accepted
    sent: int  # bytes of chunks
    received: int


class Master:
    """A blob of random tensors on disk, whose last number each node replaces by its own."""

    def __init__(self, spec: Spec, number: int, folder: Path):
        self.tensors = draw(spec, number)
        data = encode_tensors(self.tensors)
        self.last = last_tensor(data)
        self.size = len(data)
        self.path = folder / f"master-{number}"
        self.path.write_bytes(data)
        self._but_last = hashlib.sha256(data[:-4])

    def digest(self, tail: bytes) -> str:
        """Return the digest of the blob that ends with `tail`, 4 bytes."""
        complete = self._but_last.copy()
        complete.update(tail)
        return complete.hexdigest()


class Shelf(BlobStore):
    """A node's store; its contribution is a master with other last bytes."""

    def __init__(self, folder: Path, master: Master):
        super().__init__(folder)
        self._master, self._tail, self._shown = master, b"", ""

    def show(self, tail: bytes) -> str:
        """Pretend to hold the master with this end; return its digest."""
        self._tail, self._shown = tail, self._master.digest(tail)
        return self._shown

    def path(self, digest: str) -> Path:
        """Return where the blob stands, or the master that stands for it."""
        return self._master.path if digest == self._shown else super().path(digest)

    def read(self, digest: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes of a blob from `offset`;
        they must not begin in the last 4.
        """
        data = super().read(digest, offset, length)
        if digest == self._shown and offset + len(data) == self._master.size:
            return data[:-4] + self._tail
        return data

    def checksums(self, digest: str, chunk_size: int) -> list[int] | None:
        """CRC-32 of each chunk, as it is shown."""
        if digest != self._shown:
            return super().checksums(digest, chunk_size)
        return [
            zlib.crc32(self.read(digest, at, chunk_size))
            for at in range(0, self._master.size, chunk_size)
        ]


class EmptyNode(threading.Thread):
    """A node that answers each broadcast with a contribution at once."""

    def __init__(self, url: str, spec: Spec, node: int, folder: Path, masters: Sequence[Master]):
        super().__init__(daemon=True)
        self.facts = Facts([], [], 0, 0)
        self._spec, self._node, self._name = spec, node, f"node-{node:03}"
        self._session = hashlib.sha256(self._name.encode()).hexdigest()[:16]
        self._inbox: queue.Queue[object] = queue.Queue()
        claim = Claim(topics.presence(spec.federation, self._name), self._session)
        self._up = topics.up(spec.federation, self._name)
        self._master = masters[node % BLOBS]
        self._store = Shelf(folder / self._name, self._master)
        # where the broadcasts are kept that it received
        self._keeps = folder if node == 0 else None
        self._finished = False
        endpoint, client = Endpoint.parse(url), f"edge-node/{spec.federation}/{self._name}"
        self._mqtt = MqttClient(endpoint, client, inbox=self._inbox, persistent=True, claim=claim)
        self._transfer = BlobTransfer(
            endpoint, spec.federation, self._name, self._store, self._inbox
        )

    def run(self) -> None:
        """Take part to the end."""
        federation, run = self._spec.federation, self._spec.run
        self._transfer.start()
        self._mqtt.subscribe(topics.round_state(federation), topics.down(federation, self._name))
        with self._mqtt:
            while not self._is_last(self._inbox.get(timeout=600)):
                pass
            self._mqtt.publish(self._up, encode(Finished(session=self._session, run=run)))
            self._mqtt.publish_presence(online=False)
            self._mqtt.flush(30)
        self._transfer.close()
        self.facts = self.facts._replace(
            sent=self._transfer.bytes_sent, received=self._transfer.bytes_received
        )

    def _is_last(self, event: object) -> bool:
        """Do what an event asks for; whether it was the result's arrival."""
        match event:
            case Connected():
                self._mqtt.publish_presence(online=True)
                hello = Hello(session=self._session, run=self._spec.run, software="benchmark")
                self._mqtt.publish(self._up, encode(hello))
            case Delivery():
                self._mqtt.ack(event)
                self._hear(decode_any(event.payload))
            case Fetched(manifest):
                return self._received(manifest)
        return False

    def _hear(self, message: object) -> None:
        match message:
            case RoundState(broadcast=Manifest() as broadcast):
                self._finished = message.status == "finished"
                self._transfer.fetch(broadcast)
            case Accepted():
                self.facts.accepted.append((message.round, time.monotonic()))

    def _received(self, manifest: Manifest) -> bool:
        begins = manifest.round + self._finished
        self.facts.fetched.append((begins, time.monotonic()))
        if self._keeps:
            (self._keeps / f"broadcast-{begins}").write_bytes(
                self._store.path(manifest.digest).read_bytes()
            )
        self._store.remove(manifest.digest)
        if not self._finished:
            self._contribute(manifest.round)
        return self._finished

    def _contribute(self, round_: int) -> None:
        digest = self._store.show(own_number(self._node, round_).tobytes())
        self._transfer.offer(digest, self._transfer.chunk_size(CHUNK))
        blob = Manifest(
            federation=self._spec.federation,
            run=self._spec.run,
            round=round_,
            node=self._name,
            digest=digest,
            size=self._master.size,
            chunk_size=self._transfer.chunk_size(CHUNK),
        )
        weight = own_weight(self._node)
        message = Contribution(
            session=self._session, run=blob.run, round=round_, weight=weight, blob=blob
        )
        self._mqtt.publish(self._up, encode(message))


def draw(spec: Spec, number: int) -> Arrays:
    """The tensors of master `number`."""
    random = generator(number, "crowd")
    shapes = {name: tensor.shape for name, tensor in select(spec.tensors, spec.sends).items()}
    drawn = {
        name: random.normal(0, _START, shape).astype(np.float32) for name, shape in shapes.items()
    }
    return {
        name: np.abs(values) if name.endswith("running_var") else values
        for name, values in drawn.items()
    }


def own_number(node: int, round_: int) -> np.ndarray:
    """The last number of a node's contribution, float32 []."""
    return np.array(round_ + node / 1024, "<f4")


def own_weight(node: int) -> int:
    """The training images that a node claims to have."""
    return 5 + node % 7


def last_tensor(data: bytes) -> str:
    """The tensor that a safetensors file ends with."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return str(max(header, key=lambda name: int(header[name]["data_offsets"][1])))


def take_part(url: str, spec: Spec, nodes: int, folder: Path) -> Facts:
    """Let `nodes` nodes take part to the federation's end.

    What node 0 received lies in `folder` as `broadcast-N`.
    """
    processes = -(-nodes // A_PROCESS)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        parts = [
            pool.submit(_share, url, spec, range(k, nodes, processes), folder)
            for k in range(processes)
        ]
        return _together([part.result() for part in parts])


def _share(url: str, spec: Spec, numbers: Sequence[int], folder: Path) -> Facts:
    mine = folder / f"process-{numbers[0]}"
    mine.mkdir()
    masters = [Master(spec, number, mine) for number in range(BLOBS)]
    nodes = [EmptyNode(url, spec, number, folder, masters) for number in numbers]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    return _together([node.facts for node in nodes])


def _together(parts: Sequence[Facts]) -> Facts:
    return Facts(
        [each for part in parts for each in part.fetched],
        [each for part in parts for each in part.accepted],
        sum(part.sent for part in parts),
        sum(part.received for part in parts),
    )
