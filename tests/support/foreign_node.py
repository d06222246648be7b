"""A node written from docs/protocol.md: MQTT, JSON, SHA-256 and safetensors, and nothing of this project."""

import hashlib
import json
import queue
import random
import secrets
import struct
import time
from typing import Any

import numpy as np
import paho.mqtt.client as mqtt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from safetensors.numpy import load, save

Tensors = dict[str, np.ndarray]


class ForeignNode:
    """Takes part in the federation `default` without images: it contributes what it received, plus `shift`."""

    patience = 60.0  # seconds for a whole federation

    def __init__(
        self,
        port: int,
        name: str,
        version: MQTTProtocolVersion,
        *,
        weight: float,
        shift: float,
        key: Ed25519PrivateKey | None = None,
        coordinator: Ed25519PublicKey | None = None,
    ):
        self.key, self.coordinator = key, coordinator  # of a signed federation
        self.port, self.name, self.version, self.weight, self.shift = port, name, version, weight, shift
        self.session = secrets.token_hex(8)
        self.spec: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.round = 0  # the last one that it contributed to
        self.contribution: dict[str, Any] = {}  # as long as it is not accepted
        self.offered: dict[str, bytes] = {}
        self.fetching: dict[str, Any] = {}  # a manifest
        self.have: dict[int, bytes] = {}  # its chunks
        self.asked: set[int] = set()
        self.room = 2  # chunks that may be outstanding
        self.result: Tensors = {}
        self.inbox: queue.Queue[tuple[mqtt.Client, mqtt.MQTTMessage | None]] = queue.Queue()
        self.data = self.client("data", persistent=False)
        self.control = self.client("control", persistent=True)

    def run(self, dies_in: int = -1) -> Tensors:
        """Take part to the end and return the result; or die when a round opens."""
        self.control.will_set(self.topic("nodes", self.name, "presence"), self.presence(online=False), 1, retain=True)
        self.connect(self.data, persistent=False)
        self.connect(self.control, persistent=True)
        deadline = time.monotonic() + self.patience
        while not self.result and self.state.get("round") != dies_in:
            assert time.monotonic() < deadline, (self.state, self.round, self.fetching)
            try:
                self.handle(*self.inbox.get(timeout=1))
            except queue.Empty:
                self.ask(again=True)
        if self.result:
            self.tell("up", type="Finished", run=self.spec["run"])
            self.appear(online=False).wait_for_publish(5)
        for client in (self.control, self.data):
            if self.result:
                client.disconnect()
            client.loop_stop()
            if not self.result:
                client.socket().close()  # type: ignore[union-attr]
        return self.result

    # Connections

    def client(self, connection: str, *, persistent: bool) -> mqtt.Client:
        clean = None if self.version == MQTTProtocolVersion.MQTTv5 else not persistent
        api, client_id = CallbackAPIVersion.VERSION2, f"{self.name}/{connection}"
        client = mqtt.Client(api, client_id, clean, protocol=self.version, manual_ack=persistent)
        client.username_pw_set(self.name)
        client.on_connect = lambda *_: self.inbox.put((client, None))
        client.on_message = lambda _client, _data, message: self.inbox.put((client, message))
        return client

    def connect(self, client: mqtt.Client, *, persistent: bool) -> None:
        options: dict[str, Any] = {}
        if self.version == MQTTProtocolVersion.MQTTv5:
            options = {"clean_start": not persistent, "properties": Properties(PacketTypes.CONNECT)}  # type: ignore[no-untyped-call]
            options["properties"].SessionExpiryInterval = 86_400 if persistent else 0
        client.connect("127.0.0.1", self.port, **options)
        client.loop_start()

    def topic(self, *levels: str) -> str:
        return "/".join(("edge-node/v1/default", *levels))

    def presence(self, *, online: bool) -> bytes:
        topic = self.topic("nodes", self.name, "presence")
        return self.seal(topic, {"type": "Presence", "session": self.session, "online": online})

    def seal(self, topic: str, message: dict[str, Any]) -> bytes:
        text = json.dumps(message).encode()
        if self.key is None:
            return text
        return b"\x01" + self.key.sign(b"\0".join((b"edge-node/v1", topic.encode(), text))) + text

    def unseal(self, topic: str, payload: bytes) -> dict[str, Any]:
        """What the coordinator says; raises InvalidSignature if somebody else does."""
        if self.coordinator is not None:
            assert payload[:1] == b"\x01"
            self.coordinator.verify(payload[1:65], b"\0".join((b"edge-node/v1", topic.encode(), payload[65:])))
            payload = payload[65:]
        message: dict[str, Any] = json.loads(payload)
        if self.coordinator is not None and (broadcast := message.get("broadcast")):
            fields = [str(broadcast[name]) for name in ("federation", "run", "round", "node", "digest")]
            signed = b"\0".join((b"edge-node/v1", b"broadcast", "\n".join(fields).encode()))
            self.coordinator.verify(bytes.fromhex(broadcast["signature"]), signed)
        return message

    def appear(self, *, online: bool) -> mqtt.MQTTMessageInfo:
        topic = self.topic("nodes", self.name, "presence")
        return self.control.publish(topic, self.presence(online=online), 1, retain=True)

    def tell(self, topic: str, **message: Any) -> None:
        topic = self.topic("nodes", self.name, topic)
        self.control.publish(topic, self.seal(topic, {"session": self.session, **message}), 1)

    def handle(self, client: mqtt.Client, message: mqtt.MQTTMessage | None) -> None:
        if message is None and client is self.control:
            down = self.topic("nodes", self.name, "down")
            coordinator = self.topic("nodes/coordinator/presence")
            client.subscribe([(topic, 1) for topic in (self.topic("spec"), self.topic("round"), down, coordinator)])
            self.announce()
        elif message is None:
            wants, chunks = self.topic("blobs", self.name, "want/+"), self.topic("blobs/coordinator/chunks/+/+")
            client.subscribe([(wants, 0), (chunks, 0)])
            self.ask(again=True)
        elif client is self.control:
            self.follow(self.unseal(message.topic, message.payload))
            client.ack(message.mid, message.qos)
        elif "/want/" in message.topic:
            self.serve(json.loads(message.payload))
        else:
            self.take_in(message)

    # Messages

    def announce(self) -> None:
        if self.spec:
            self.appear(online=True)
            self.tell("up", type="Hello", run=self.spec["run"], software="foreign", round=self.round)
        if self.contribution:
            self.tell("up", **self.contribution)

    def follow(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "Spec" if not self.spec:
                self.spec = message
                self.announce()
            case "RoundState":
                self.state = message
            case "Presence" if message["online"]:  # the coordinator is back, and may have missed what was said
                self.announce()
            case "Accepted" if message["session"] == self.session and message["round"] == self.round:
                self.contribution, self.offered = {}, {}
            case "Refusal" if message["session"] == self.session:
                raise AssertionError(message)
        if self.spec and self.spec["run"] == self.state.get("run"):
            status, manifest = self.state["status"], self.state["broadcast"]
            news = status == "finished" or (status == "open" and self.state["round"] > self.round)
            if news and self.fetching != manifest:
                self.fetching, self.have, self.asked, self.room = manifest, {}, set(), 2
                self.ask()

    def contribute(self, received: Tensors) -> None:
        shapes = {name: tensor["shape"] for name, tensor in self.spec["tensors"].items()}
        assert {name: list(value.shape) for name, value in received.items()} == shapes
        prefixes = [prefix + "." for prefix in self.spec["sends"]]
        names = [name for name in received if any(f"{name}.".startswith(prefix) for prefix in prefixes)]
        blob = save({name: received[name] + np.float32(self.shift) for name in names})
        digest = hashlib.sha256(blob).hexdigest()
        self.round, self.offered = self.state["round"], {digest: blob}
        manifest = self.state["broadcast"] | {"node": self.name, "digest": digest, "size": len(blob)}
        self.contribution = {"type": "Contribution", "run": self.spec["run"], "round": self.round}
        self.contribution |= {"weight": self.weight, "blob": manifest}
        self.tell("up", **self.contribution)

    # Blobs

    def serve(self, want: dict[str, Any]) -> None:
        blob, size = self.offered.get(want["digest"], b""), want["chunk_size"]
        if max(want["chunks"]) * size < len(blob):
            topic = self.topic("blobs", self.name, "chunks", want["digest"], str(size))
            for index in want["chunks"]:
                self.data.publish(topic, struct.pack(">I", index) + blob[index * size : (index + 1) * size])

    def ask(self, *, again: bool = False) -> None:
        if not self.fetching:
            return
        if again:
            self.asked.clear()
        size = self.fetching["chunk_size"]
        missing = [
            index for index in range(-(-self.fetching["size"] // size)) if index not in {*self.have, *self.asked}
        ]
        random.shuffle(missing)
        if chunks := missing[: self.room - len(self.asked)]:
            self.asked |= {*chunks}
            want = {"type": "Want", "digest": self.fetching["digest"], "chunk_size": size, "chunks": chunks}
            self.data.publish(self.topic("blobs/coordinator/want", self.name), json.dumps(want))

    def take_in(self, message: mqtt.MQTTMessage) -> None:
        manifest = self.fetching
        if not manifest or not message.topic.endswith(f"/{manifest['digest']}/{manifest['chunk_size']}"):
            return
        (index,) = struct.unpack(">I", message.payload[:4])
        self.have[index] = bytes(message.payload[4:])
        self.asked.discard(index)
        self.room += 1
        self.ask()
        blob = b"".join(self.have[index] for index in sorted(self.have))
        if len(blob) == manifest["size"]:
            assert hashlib.sha256(blob).hexdigest() == manifest["digest"]
            self.fetching = {}
            if self.state["status"] == "finished":
                self.result = load(blob)
            else:
                self.contribute(load(blob))
