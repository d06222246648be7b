"""Cost of secure aggregation: bytes, time and processor time of rounds, with masks and in the open.

    python -m benchmarks.secure_rounds --nodes 10 --model mobilenet_v2 --rounds 4 --turns 3
    --training 10

Both are signed, of one broker, and take turns, since other work on the machine comes and goes.
Nodes are threads of a few processes; they train nothing, but wait as long as `--training` says
between a broadcast and their contribution, while keys and shares travel. Seconds are from one
round's end to the next, bytes those of all messages and chunks of a node, both ways, messages those
of them alone: a hundred nodes on one machine receive some chunks twice, since those that come late
have asked for them again. Processor time is a round's.
"""

import argparse
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode_any, encode, encode_tensors, read_tensors
from broker_config.protocol.messages import (
    AnyMessage,
    Contribution,
    Finished,
    Hello,
    Manifest,
    MaskingStep,
    RoundState,
    Spec,
    Welcome,
)
from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from broker_config.transfer.blob_transfer import BlobStore, BlobTransfer, Fetched
from tests.support.authority import Authority
from trainer import progress
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.masked_contributions import MaskedContributions
from trainer.federation.server.coordinator.process import coordinate
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Request, draft
from trainer.methods import make
from trainer.models.named_tensors import Arrays, select

CHUNK = 256 * 1024
A_PROCESS = 25  # nodes


class Trained(NamedTuple):
    """A node has waited as long as training takes."""

    broadcast: Manifest


class Node:
    """A node that moves all tensors by a little, in a thread."""

    def __init__(self, broker: str, kit: Kit, spec: Spec, folder: Path, training: float):
        self._spec, self._name, self._training = spec, kit.name, training
        self._session = f"{int(kit.name.rpartition('-')[2]):016x}"
        signer = MessageSigner(kit)
        endpoint = replace(Endpoint.parse(broker), signer=signer)
        self._inbox: queue.Queue[object] = queue.Queue()
        self._mqtt = MqttClient(endpoint, kit.name, inbox=self._inbox, persistent=False)
        self._store = BlobStore(folder / "blobs")
        self._transfer = BlobTransfer(endpoint, spec.federation, kit.name, self._store, self._inbox)
        self._method = make(spec.method, spec.training, spec.options, spec.head)
        self._masked = None
        if spec.mask_threshold:
            self._masked = MaskedContributions(spec, kit.name, self._session, signer, folder)
        self._round = 0
        self._trained: Progress | None = None
        self.messages = 0  # bytes

    def run(self) -> tuple[int, int]:
        """Take part to the end; the bytes that were sent and received,
        and those of messages among them.
        """
        federation = self._spec.federation
        self._transfer.start()
        self._mqtt.subscribe(topics.round_state(federation), topics.down(federation, self._name))
        with self._mqtt:
            self._tell(
                Hello(
                    session=self._session,
                    run=self._spec.run,
                    software="benchmark",
                    masks=self._masked is not None,
                )
            )
            while not self._is_last(self._inbox.get()):
                pass
            self._tell(Finished(session=self._session, run=self._spec.run))
            self._mqtt.flush(30)
        total = self.messages + self._transfer.bytes_sent + self._transfer.bytes_received
        self._transfer.close()
        return total, self.messages

    def _tell(self, message: AnyMessage) -> None:
        payload = encode(message)
        self.messages += len(payload)
        self._mqtt.publish(topics.up(self._spec.federation, self._name), payload)

    def _is_last(self, event: object) -> bool:
        match event:
            case Delivery(payload=payload):
                self._mqtt.ack(event)
                self.messages += len(payload)
                return self._hear(decode_any(payload))
            case Fetched(manifest):
                threading.Timer(self._training, lambda: self._inbox.put(Trained(manifest))).start()
            case Trained(manifest):
                self._trained = self._train(manifest)
                self._contribute()
        return False

    def _hear(self, message: AnyMessage) -> bool:
        match message:
            case RoundState(status="finished"):
                return True
            case RoundState(status="open", broadcast=Manifest() as broadcast) if (
                message.round > self._round
            ):
                self._round, self._trained = message.round, None
                self._transfer.fetch(broadcast)
                self._tell_keys()
            case Welcome():
                self._tell_keys()
            case MaskingStep() if self._masked:
                for answer in self._masked.advance(message):
                    self._tell(answer)
                if message.counted or message.shares:
                    self._contribute()
        return False

    def _tell_keys(self) -> None:
        if self._masked and self._round:
            self._tell(self._masked.begin(self._round))

    def _train(self, broadcast: Manifest) -> Progress:
        received = dict(read_tensors(self._store.path(broadcast.digest), self._spec.tensors))
        moved = np.float32(1e-3 * (1 + int(self._session, 16)))
        sent: Arrays = {
            name: each + moved for name, each in select(received, self._spec.sends).items()
        }
        digest, size = self._store.put(encode_tensors(sent))
        blob = msgspec.structs.replace(
            broadcast, node=self._name, digest=digest, size=size, signature="", record=None
        )
        return Progress(
            run=self._spec.run,
            round=broadcast.round,
            stage="contributed",
            state="",
            digest="",
            broadcast=broadcast,
            weight=40.0,
            blob=blob,
            history=(),
        )

    def _contribute(self) -> None:
        trained = self._trained
        if trained is None or (self._masked and not self._masked.can_mask(trained.round)):
            return
        blob, weight = trained.blob, trained.weight
        if self._masked:
            blob, weight = self._masked.mask(self._store, self._method, trained), 1.0
        assert blob is not None
        self._transfer.offer(blob.digest, blob.chunk_size)
        self._tell(
            Contribution(
                session=self._session,
                run=self._spec.run,
                round=trained.round,
                weight=weight,
                blob=blob,
            )
        )
        self._trained = None


def be_nodes(
    broker: str, kits: list[Kit], spec: Spec, folder: Path, training: float, out: Any
) -> None:
    """Be some nodes to the federation's end; put the means of their bytes,
    and the processor's seconds of one.
    """
    nodes = [Node(broker, kit, spec, folder / kit.name, training) for kit in kits]
    moved: list[tuple[int, int]] = []
    threads = [
        threading.Thread(target=lambda node=node: moved.append(node.run())) for node in nodes
    ]
    before = time.process_time()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    out.put(
        (
            *map(statistics.mean, zip(*moved, strict=True)),
            (time.process_time() - before) / len(nodes),
        )
    )


def be_coordinator(
    broker: str, kit: Kit, spec: Spec, first: Arrays, folder: Path, out: Any
) -> None:
    """Coordinate; put when each round was closed, and then the processor's seconds."""
    closed = list[tuple[float, float]]()

    def report(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.RoundClosed):
            closed.append((time.perf_counter(), time.process_time()))

    endpoint = replace(Endpoint.parse(broker), signer=MessageSigner(kit))
    with Ledger(folder) as ledger:
        coordinate(ledger, spec, first, endpoint, report, linger=0)
    out.put(closed)


class Figures(NamedTuple):
    """What a round took: seconds, the median; bytes of a node;
    processor seconds of the coordinator and of a node.
    """

    seconds: float
    bytes: float
    messages: float  # bytes among these
    coordinator: float
    node: float


def measure(broker: str, folder: Path, asked: argparse.Namespace, *, secure: bool) -> Figures:
    """Run one federation."""
    names = [f"node-{number}" for number in range(asked.nodes)]
    federation = f"{'masked' if secure else 'open'}-{folder.name}"
    authority = Authority(federation, nodes=names)
    request = Request(
        "fedavg",
        model=asked.model,
        weights="none",
        aggregate="mean",
        codec="none",
        rounds=asked.rounds,
        secure_aggregation=secure,
    )
    spec, first = draft(request, federation=federation, classes=("a", "b"), nodes=asked.nodes)
    context = multiprocessing.get_context("spawn")
    closed, done = context.Queue(), context.Queue()
    server = context.Process(
        target=be_coordinator,
        args=(broker, authority.kit("coordinator"), spec, first, folder / "coordinator", closed),
    )
    server.start()
    groups = [names[start : start + A_PROCESS] for start in range(0, len(names), A_PROCESS)]
    nodes = [
        context.Process(
            target=be_nodes,
            args=(broker, list(map(authority.kit, group)), spec, folder, asked.training, done),
        )
        for group in groups
    ]
    for each in nodes:
        each.start()
    times = closed.get()
    found = [done.get() for _ in nodes]
    for each in (server, *nodes):
        each.join()
    taken = [later[0] - earlier[0] for earlier, later in pairwise(times)]
    used = (times[-1][1] - times[0][1]) / len(taken)
    moved, told, busy = (statistics.mean(each) / asked.rounds for each in zip(*found, strict=True))
    return Figures(statistics.median(taken), moved, told, used, busy)


def main() -> None:
    """Print what rounds took in the open and behind masks, and the ratios of each turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--model", default="small")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--training", type=float, default=0.0, help="seconds")
    asked = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before, {asked.nodes} nodes, "
        f"{asked.model}"
    )
    found: dict[bool, list[Figures]] = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory() as name,
        start_broker(Path(name) / "broker", kind="mosquitto") as running,
    ):
        for turn in range(asked.turns):
            for secure, figures in found.items():
                folder = Path(name) / f"{turn}-{secure}"
                folder.mkdir()
                figures.append(measure(running.url, folder, asked, secure=secure))
                print(
                    "masked" if secure else "open",
                    *(f"{each:.4g}" for each in figures[-1]),
                    flush=True,
                )
    for field in Figures._fields:
        plain, masked = (
            [getattr(each, field) for each in found[secure]] for secure in (False, True)
        )
        ratios = [more / less for less, more in zip(plain, masked, strict=True)]
        figures_ = f"open {statistics.median(plain):.4g}, masked {statistics.median(masked):.4g}"
        print(
            f"{field:12} {figures_}, ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f})"
        )
    print(f"load {os.getloadavg()[0]:.1f} afterwards")


if __name__ == "__main__":
    main()
