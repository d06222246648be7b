"""A live coordinator under hostile frames, sent through a real broker,
while two honest nodes go on with their rounds.

Hostile peers write where a broker's access list lets a node write: below their own names.
"""

import hashlib
import json
import secrets
import struct
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import paho.mqtt.client as mqtt
import psutil
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from broker_config.broker.embedded import start_broker
from tests.support.foreign_node import ForeignNode, Tensors
from tests.support.frame_mutation import Mutator, small_weights
from tests.support.plants import CLASSES, start
from trainer.federation.server.membership import STRIKES

V5 = MQTTProtocolVersion.MQTTv5
ROUNDS = 10
# bytes that an attack may add to a coordinator's memory: its inbox is full of large messages, 100
# MB
GROWTH = 1 << 30
DISK = 5 << 20  # bytes that its state folder may take; honest rounds take 1 MB
NODES = 100  # places
IMPOSSIBLE = ("évil", "..", "x" * 300)  # names
# frames after which another peer turns hostile: a name that was refused often gets no further
SPELL = 100
ROOT = "edge-node/v1/default"


class Outcome(NamedTuple):
    """What a federation under attack came to."""

    results: dict[str, Tensors]  # of the honest nodes
    events: list[dict[str, Any]]  # that the coordinator reported
    frames: int  # that were hostile
    grown: int  # bytes that its memory rose above that of its first rounds
    disk: int  # bytes, at most, in its state folder
    seconds: float


class Gate:
    """Lets honest nodes contribute to a round when so much of the attack is over."""

    def __init__(self) -> None:
        self._changed, self._open = threading.Condition(), 0

    def open(self, round_: int) -> None:
        """For contributions up to this round."""
        with self._changed:
            self._open = max(self._open, round_)
            self._changed.notify_all()

    def wait(self, round_: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._open >= round_, 600), (
                f"round {round_} was not reached"
            )


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
        self.sessions: defaultdict[str, str] = defaultdict(lambda: secrets.token_hex(8))
        self.sent = 0  # frames
        self.blobs: dict[str, bytes] = {}
        self.known = threading.Event()
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, "attacker", protocol=V5)
        self.client.on_message = self._read
        self.client.max_inflight_messages_set(1000)
        self.client.connect("127.0.0.1", port)
        self.client.subscribe(
            [(f"{ROOT}/spec", 1), (f"{ROOT}/round", 1), (f"{ROOT}/blobs/+/want/coordinator", 0)]
        )
        self.client.loop_start()
        assert self.known.wait(60), "no coordinator"

    def _read(self, _client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        told = json.loads(message.payload)
        if "/want/" in message.topic:
            name, digest = message.topic.split("/")[4], told["digest"]
            topic = f"{ROOT}/blobs/{name}/chunks/{digest}/{told['chunk_size']}"
            self.send(topic, bytes(4) + self.blobs.pop(digest, b""))
        else:
            self.spec, self.state = (
                (told, self.state) if told["type"] == "Spec" else (self.spec, told)
            )
        if self.spec and self.state:
            self.known.set()

    def hello(self, name: str) -> None:
        self.tell(name, "up", type="Hello", run=self.spec["run"], software="evil")

    def tell(self, name: str, topic: str, **message: Any) -> None:
        told = {"session": self.sessions[name], **message}
        self.send(f"{ROOT}/nodes/{name}/{topic}", json.dumps(told).encode())

    def send(self, topic: str, payload: bytes, **options: Any) -> mqtt.MQTTMessageInfo:
        self.sent += 1
        return self.client.publish(topic, payload, self.random.choice((0, 1)), **options)

    def attack(self) -> None:
        """One hostile frame."""
        name, random = self.name(), self.random
        deeds = (
            self.joins,
            self.offers,
            self.serves,
            self.asks,
            self.appears,
            self.floods,
            self.chunks,
        )
        random.choice(deeds + (self.mutated,) * 6)(name)

    def name(self) -> str:
        """One of a few peers, others every while, or a name that no node can have."""
        possible = [f"evil-{self.sent // SPELL + number}" for number in range(3)]
        return self.random.choice(
            (*possible, *IMPOSSIBLE) if self.random.random() < 0.3 else possible
        )

    def mutated(self, name: str) -> None:
        """A real message, changed, of this run and of a session that takes part if one of this
        name does.
        """
        known = {
            "run": self.spec["run"],
            "session": self.sessions[name],
            "round": self.state["round"],
            "node": name,
        }
        payload = self.mutator.current(self.mutator.message().payload, **known)
        self.send(f"{ROOT}/nodes/{name}/{self.random.choice(('up', 'up', 'presence'))}", payload)

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
        blob = {
            "federation": "default",
            "run": run,
            "round": round_,
            "node": name,
            "digest": digest,
            "size": size,
        }
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
        want = {
            "type": "Want",
            "digest": manifest["digest"],
            "chunk_size": chunk_size,
            "chunks": chunks,
        }
        self.send(f"{ROOT}/blobs/coordinator/want/{name}", json.dumps(want).encode())

    def appears(self, name: str) -> None:
        session = self.random.choice((self.sessions[name], secrets.token_hex(8)))
        message = {"type": "Presence", "session": session, "online": self.random.random() < 0.5}
        self.send(f"{ROOT}/nodes/{name}/presence", json.dumps(message).encode(), retain=True)

    def floods(self, name: str) -> None:
        """Much of something, faster than it can be answered."""
        metrics = {f"{number}\x1b[2J": 1.0 for number in range(3000)}
        match self.random.randrange(4):
            case 0:
                self.send(
                    f"{ROOT}/nodes/{name}/up", bytes(self.random.choice((200_000, 5_000_000)))
                )
            case 1:
                for _ in range(20):
                    self.tell(
                        name, "up", type="Telemetry", run=self.spec["run"], round=1, metrics=metrics
                    )
            case 2:
                for _ in range(300):
                    self.joins(self.name())
            case _:
                for _ in range(50):
                    self.offers(name)

    def chunks(self, name: str) -> None:
        index = self.random.choice((0, 1, 3, 2**32 - 1))
        length = self.random.choice((0, 1, 1024, 65_536, 1_000_000))
        topic = (
            f"{ROOT}/blobs/{name}/chunks/{secrets.token_hex(32)}/"
            f"{self.random.choice((1024, 65_536))}"
        )
        self.send(topic, struct.pack(">I", index) + bytes(length))

    def storms(self) -> None:
        """Hellos of many peers, without a pause for the answers."""
        for number in range(2000):
            name = f"evil-{number % 50}"
            hello = {
                "type": "Hello",
                "session": secrets.token_hex(8),
                "run": self.spec["run"],
                "software": "evil",
            }
            self.sent += 1
            self.client.publish(f"{ROOT}/nodes/{name}/up", json.dumps(hello), 0)

    def keep_pace(self) -> None:
        """Wait until the broker has taken all so far."""
        self.client.publish(f"{ROOT}/nodes/evil-0/noise", b"", 1).wait_for_publish(30)

    def close(self) -> None:
        """Nobody of ours takes part any more."""
        for name in self.sessions:
            self.client.publish(f"{ROOT}/nodes/{name}/up", b"{", 1)
        self.keep_pace()
        self.client.disconnect()
        self.client.loop_stop()


def attack_federation(
    folder: Path, mutator: Mutator, frames: int, deed: Callable[[Attacker], None] = Attacker.attack
) -> Outcome:
    """Send so many hostile frames while a federation of two honest nodes goes through its
    rounds.
    """
    folder.mkdir()
    started = time.monotonic()
    with start_broker(folder / "broker", kind="mosquitto") as broker:
        coordinator = start(
            "coordinate",
            broker.url,
            "--json",
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            NODES,
            "--quorum",
            2,
            "--linger",
            1,
            "--model",
            "small",
            "--method",
            "fedavg",
            "--rounds",
            ROUNDS,
            "--seed",
            7,
            "--weights",
            small_weights(folder / "weights"),
            "--state",
            folder / "state",
            log=folder / "log",
            module="tests.support.small_chunks",
        )
        try:
            gate, results = Gate(), dict[str, Tensors]()
            attacker = Attacker(broker.port, mutator)
            honest = [
                Honest(broker.port, name, gate, shift)
                for name, shift in (("a", 0.25), ("b", -0.75))
            ]
            threads = [
                threading.Thread(target=_take_part, args=(node, results), daemon=True)
                for node in honest
            ]
            for thread in threads:
                thread.start()
            meter = Meter(coordinator, folder)
            while attacker.sent < frames:
                deed(attacker)
                if attacker.sent // 50 > meter.looks:
                    attacker.keep_pace()
                    meter.look(attacker.sent / frames)
                    gate.open(1 + (ROUNDS - 1) * attacker.sent // frames)
            attacker.close()
            gate.open(ROUNDS)
            assert coordinator.wait(120) == 0, meter.log()
            for thread in threads:
                thread.join(60)
        finally:
            coordinator.kill()
    # What is logged goes to the same file, and may follow an event on its line.
    events = [
        json.JSONDecoder().raw_decode(line)[0]
        for line in meter.log().splitlines()
        if line.startswith("{")
    ]
    assert sorted(results) == ["a", "b"], "the honest nodes did not finish"
    return Outcome(
        results, events, attacker.sent, meter.grown, meter.disk, time.monotonic() - started
    )


def _take_part(node: Honest, results: dict[str, Tensors]) -> None:
    results[node.name] = node.run()


class Meter:
    """What a coordinator's process takes of the machine."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path):
        self.looks = self.disk = self.grown = 0
        self._process, self._folder, self._level = process, folder, 0
        self._watched = psutil.Process(process.pid)

    def look(self, share: float) -> None:
        """Measure, when so much of the attack is over;
        memory must be level after a fifth of it, or at the first look.

        One deed can be a flood of hundreds of frames: a short attack may be beyond its fifth at the
        first look.
        """
        assert self._process.poll() is None, self.log()
        self.looks += 1
        memory = self._watched.memory_info().rss
        self._level = max(self._level, memory) if share < 0.2 or self.looks == 1 else self._level
        self.grown = max(self.grown, memory - self._level)
        self.disk = max(self.disk, size_of(self._folder / "state"))

    def log(self) -> str:
        """All that it has printed."""
        return (self._folder / "log").read_text()


def size_of(folder: Path) -> int:
    """Bytes that the files below a folder occupy."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += 512 * file.stat().st_blocks
    return total


def check(outcome: Outcome, peace: Outcome) -> str:
    """An attack must change nothing, fill nothing and be told of briefly.

    Returns a line about it.
    """
    assert peace.results.keys() == outcome.results.keys()
    for name, tensors in outcome.results.items():
        assert {key: value.tobytes() for key, value in tensors.items()} == {
            key: value.tobytes() for key, value in peace.results[name].items()
        }, f"the result of {name} has changed"
    closed = [event["contributors"] for event in outcome.events if event["event"] == "RoundClosed"]
    assert closed == [["a", "b"]] * ROUNDS, closed
    assert outcome.grown < GROWTH, f"memory grew by {outcome.grown >> 20} MiB"
    assert outcome.disk < DISK, f"the state folder took {outcome.disk >> 10} KiB"
    refused = Counter(event["node"] for event in outcome.events if event["event"] == "NodeRefused")
    assert max(refused.values()) <= STRIKES + 1, refused
    assert refused, "nobody was refused"
    told = sum(event["event"] != "Activity" for event in outcome.events)
    assert told < 100 + 20 * len(refused), f"{told} lines of log"
    return (
        f"{outcome.frames} frames, {len(refused)} peers refused, {told} lines of log, "
        f"memory +{outcome.grown / 2**20:.1f} MiB, state folder at most {outcome.disk >> 10} KiB, "
        f"{outcome.seconds:.0f} s"
    )
