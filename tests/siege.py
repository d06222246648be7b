"""A live coordinator under hostile frames, sent through a real broker, while two honest nodes go on with their rounds.

Hostile peers write where a broker's access list lets a node write: below their own names.
"""

import hashlib
import json
import secrets
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import paho.mqtt.client as mqtt
import psutil
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from broker_config.embedded import start_broker
from tests.foreign import ForeignNode, Tensors
from tests.plants import CLASSES, start
from tests.traffic import Mutator, small_weights

V5 = MQTTProtocolVersion.MQTTv5
ROUNDS = 10
NAMES = ("evil-0", "evil-1", "evil-2", "evil-3", "évil", "..", "x" * 300)
ROOT = "edge-node/v1/default"


class Outcome(NamedTuple):
    """What a federation under siege came to."""

    result: Tensors
    events: list[dict[str, Any]]  # as the coordinator reported them
    log: str  # all that it printed
    grown: int  # bytes that its memory rose above that of its first rounds
    disk: int  # bytes, at most, in its state folder
    seconds: float


class Gate:
    """Lets honest nodes contribute to a round when so much of the siege is over."""

    def __init__(self) -> None:
        self._changed, self._open = threading.Condition(), 0

    def open(self, round_: int) -> None:
        """For contributions up to this round."""
        with self._changed:
            self._open = max(self._open, round_)
            self._changed.notify_all()

    def wait(self, round_: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._open >= round_, 600), f"round {round_} was not reached"


class Honest(ForeignNode):
    """Contributes when the gate is open."""

    patience = 900

    def __init__(self, port: int, name: str, gate: Gate, shift: float):
        super().__init__(port, name, V5, weight=5, shift=shift)
        self.gate = gate

    def contribute(self, received: Tensors) -> None:
        self.gate.wait(self.state["round"])
        super().contribute(received)


class Attacker:
    """Several hostile peers on one connection."""

    def __init__(self, port: int, mutator: Mutator):
        self.mutator, self.random = mutator, mutator.random
        self.spec: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.sessions = {name: secrets.token_hex(8) for name in NAMES}
        self.blobs: dict[str, bytes] = {}
        self.known = threading.Event()
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, "attacker", protocol=V5)
        self.client.on_message = self._read
        self.client.max_inflight_messages_set(1000)
        self.client.connect("127.0.0.1", port)
        self.client.subscribe([(f"{ROOT}/spec", 1), (f"{ROOT}/round", 1), (f"{ROOT}/blobs/+/want/coordinator", 0)])
        self.client.loop_start()
        assert self.known.wait(30), "no coordinator"

    def _read(self, _client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        told = json.loads(message.payload)
        if "/want/" in message.topic:
            name, digest = message.topic.split("/")[4], told["digest"]
            topic = f"{ROOT}/blobs/{name}/chunks/{digest}/{told['chunk_size']}"
            self.send(topic, bytes(4) + self.blobs.pop(digest, b""))
        else:
            self.spec, self.state = (told, self.state) if told["type"] == "Spec" else (self.spec, told)
        if self.spec and self.state:
            self.known.set()

    def hello(self, name: str) -> None:
        self.tell(name, "up", type="Hello", run=self.spec["run"], software="evil")

    def tell(self, name: str, topic: str, **message: Any) -> None:
        told = {"session": self.sessions[name], **message}
        self.send(f"{ROOT}/nodes/{name}/{topic}", json.dumps(told).encode())

    def send(self, topic: str, payload: bytes, **options: Any) -> mqtt.MQTTMessageInfo:
        return self.client.publish(topic, payload, self.random.choice((0, 1)), **options)

    def attack(self) -> None:
        """One hostile frame."""
        name, random = self.random.choice(NAMES), self.random
        deeds = (self.joins, self.offers, self.serves, self.asks, self.appears, self.floods, self.chunks)
        random.choice(deeds + (self.mutated,) * 6)(name)

    def mutated(self, name: str) -> None:
        """A real message, changed, of this run and of a session that takes part if one of this name does."""
        payload = self.current(self.mutator.message().payload, name)
        self.send(f"{ROOT}/nodes/{name}/{self.random.choice(('up', 'up', 'presence'))}", payload)

    def current(self, payload: bytes, name: str) -> bytes:
        try:
            message = json.loads(payload)
            known = {"run": self.spec["run"], "session": self.sessions[name], "round": self.state["round"]}
            message |= {key: value for key, value in known.items() if key in message and self.random.random() < 0.9}
            if isinstance(message.get("blob"), dict):
                message["blob"] |= {"run": self.spec["run"], "node": name, "round": self.state["round"]}
            return json.dumps(message).encode()
        except (ValueError, TypeError, RecursionError, AttributeError):
            return payload

    def joins(self, name: str) -> None:
        if self.random.random() < 0.5:
            self.sessions[name] = secrets.token_hex(8)
        self.hello(name)

    def offers(self, name: str) -> None:
        """Manifests that promise anything, and nothing comes."""
        size = self.random.choice((1, 1000, 240_000, 244_000, 1 << 20, 1 << 40))
        self.offer(name, secrets.token_hex(32), size, self.random.choice((1024, 65_536, 1 << 24)))

    def serves(self, name: str) -> None:
        """Blobs that come, as promised or with other bytes, and are no contribution."""
        blob = self.mutator.blob()
        digest = hashlib.sha256(blob).hexdigest()
        self.blobs[digest] = blob[::-1] if self.random.random() < 0.3 else blob
        self.offer(name, digest, len(blob), 1 << 20)

    def offer(self, name: str, digest: str, size: int, chunk_size: int) -> None:
        run, round_ = self.spec["run"], self.state["round"]
        blob = {"federation": "default", "run": run, "round": round_, "node": name, "digest": digest, "size": size}
        blob |= {"chunk_size": chunk_size}
        self.tell(name, "up", type="Contribution", run=run, round=round_, weight=5, blob=blob)

    def asks(self, name: str) -> None:
        """Wants for everything, in chunks of all sizes."""
        manifest = self.state.get("broadcast") or {"digest": "0" * 64, "size": 1 << 20}
        chunk_size = self.random.choice((1024, 65_536, self.random.randint(1024, 1 << 24)))
        there = -(-manifest["size"] // chunk_size)
        chunks = [self.random.randrange(there) for _ in range(self.random.choice((1, 30, 1024)))]
        if self.random.random() < 0.2:
            chunks[0] = self.random.choice((1 << 30, 1 << 31, -1, there))
        want = {"type": "Want", "digest": manifest["digest"], "chunk_size": chunk_size, "chunks": chunks}
        self.send(f"{ROOT}/blobs/coordinator/want/{name}", json.dumps(want).encode())

    def appears(self, name: str) -> None:
        session = self.random.choice((self.sessions[name], secrets.token_hex(8)))
        message = {"type": "Presence", "session": session, "online": self.random.random() < 0.5}
        self.send(f"{ROOT}/nodes/{name}/presence", json.dumps(message).encode(), retain=True)

    def floods(self, name: str) -> None:
        """Much of it, of one kind or another."""
        metrics = {f"{number}\x1b[2J": 1.0 for number in range(self.random.choice((1, 3000)))}
        if self.random.random() < 0.1:
            self.send(f"{ROOT}/nodes/{name}/up", bytes(self.random.choice((200_000, 5_000_000))))
        else:
            self.tell(name, "up", type="Telemetry", run=self.spec["run"], round=1, metrics=metrics)

    def chunks(self, name: str) -> None:
        index = self.random.choice((0, 1, 3, 2**32 - 1))
        length = self.random.choice((0, 1, 1024, 65_536, 1_000_000))
        topic = f"{ROOT}/blobs/{name}/chunks/{secrets.token_hex(32)}/{self.random.choice((1024, 65_536))}"
        self.send(topic, struct.pack(">I", index) + bytes(length))

    def keep_pace(self) -> None:
        """Wait until the broker has taken all so far."""
        self.client.publish(f"{ROOT}/nodes/evil-0/noise", b"", 1).wait_for_publish(30)

    def close(self) -> None:
        """Nobody of ours takes part any more."""
        for name in NAMES:
            self.client.publish(f"{ROOT}/nodes/{name}/up", b"{", 1)
        self.client.publish(f"{ROOT}/nodes/{NAMES[0]}/up", b"{", 1).wait_for_publish(60)
        self.client.disconnect()
        self.client.loop_stop()


def besiege(folder: Path, mutator: Mutator, frames: int) -> Outcome:
    """Send so many hostile frames while a federation of two honest nodes goes through its rounds."""
    folder.mkdir()
    started = time.monotonic()
    with start_broker(folder / "broker", kind="mosquitto") as broker:
        coordinator = start(
            "coordinate", broker.url, "--json", "--classes", ",".join(CLASSES), "--nodes", 5,
            "--start", 2, "--quorum", 2, "--linger", 1,
            "--model", "small", "--method", "fedavg", "--rounds", ROUNDS, "--seed", 7,
            "--weights", small_weights(folder / "weights"), "--chunk-size", 64,
            "--state", folder / "state", log=folder / "log",
        )  # fmt: skip
        gate = Gate()
        results: list[Tensors] = []
        honest = [Honest(broker.port, name, gate, shift) for name, shift in (("a", 0.25), ("b", -0.75))]
        threads = [threading.Thread(target=lambda n=node: results.append(n.run()), daemon=True) for node in honest]
        try:
            attacker = Attacker(broker.port, mutator)
            for thread in threads:
                thread.start()
            watched = psutil.Process(coordinator.pid)
            level = peak = disk = 0
            for number in range(frames):
                assert coordinator.poll() is None, (folder / "log").read_text()[-3000:]
                attacker.attack()
                if number % 50 == 0:
                    gate.open(1 + (ROUNDS - 1) * number // frames)
                    peak = max(peak, watched.memory_info().rss)
                    disk = max(disk, size_of(folder / "state"))
                    level = peak if number < frames // 5 else level
                    attacker.keep_pace()
            attacker.close()
            gate.open(ROUNDS)
            assert coordinator.wait(120) == 0, (folder / "log").read_text()[-3000:]
            for thread in threads:
                thread.join(30)
        finally:
            coordinator.kill()
    log = (folder / "log").read_text()
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert len(results) == 2, "the honest nodes did not finish"
    assert {name: value.tobytes() for name, value in results[0].items()} == {
        name: value.tobytes() for name, value in results[1].items()
    }
    return Outcome(results[0], events, log, peak - level, disk, time.monotonic() - started)


def size_of(folder: Path) -> int:
    """Bytes that the files below a folder occupy."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += 512 * file.stat().st_blocks
    return total
