"""A node written from docs/protocol.md: MQTT, JSON, zstd, SHA-256, safetensors, ciphers,
nothing of this project.
"""

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
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from safetensors.numpy import load, save

Tensors = dict[str, np.ndarray]


def parse(text: bytes) -> dict[str, Any]:
    """A message, compressed or not."""
    return dict(
        json.loads(zstandard.decompress(text) if text.startswith(b"\x28\xb5\x2f\xfd") else text)
    )


class ForeignNode:
    """Takes part in the federation `default` without images:
    it contributes what it received, plus `shift`.

    With `encrypts` unset it is a node of a version that knows no encryption.
    """

    patience = 200.0  # seconds for a whole federation

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
        encrypts: bool = True,
    ):
        self.pair = X25519PrivateKey.generate() if encrypts else None
        self.group_key = self.node_key = b""  # of an encrypted federation, once they are known
        self.key, self.coordinator = key, coordinator  # of a signed federation
        self.port, self.name, self.version, self.weight, self.shift = (
            port,
            name,
            version,
            weight,
            shift,
        )
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
        self.control.will_set(
            self.topic("nodes", self.name, "presence"), self.presence(online=False), 1, retain=True
        )
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

    # Encryption

    @property
    def encrypted(self) -> bool:
        return self.pair is not None and self.spec.get("encryption") == "group"

    def key_of(self, topic: str) -> bytes:
        """The group key, or this node's."""
        is_for_all = topic.endswith("/round") or "/blobs/coordinator/chunks/" in topic
        return self.group_key if is_for_all else self.node_key

    def derive(self, key: bytes, purpose: str, topic: str = "") -> bytes:
        info = b"\0".join((b"edge-node/v1", purpose.encode(), topic.encode()))
        return HKDFExpand(SHA256(), 32, info).derive(key)

    def encrypt(self, topic: str, text: bytes) -> bytes:
        """A message of which nothing is open."""
        key = self.key_of(topic)
        head = b"\x03" + self.derive(key, "id")[:8] + (nonce := secrets.token_bytes(12)) + bytes(4)
        return head + ChaCha20Poly1305(self.derive(key, "message", topic)).encrypt(
            nonce, text, head
        )

    def decrypt(self, topic: str, payload: bytes) -> dict[str, Any]:
        """The message, or its open part; empty if neither can be read."""
        if payload[:1] != b"\x03":
            return parse(payload)
        end = 25 + struct.unpack(">I", payload[21:25])[0]
        found = json.loads(payload[25:end] or b"{}")
        key = self.key_of(topic)
        if not key or payload[1:9] != self.derive(key, "id")[:8]:
            return dict(found)
        cipher = ChaCha20Poly1305(self.derive(key, "message", topic))
        return found | parse(cipher.decrypt(payload[9:21], payload[end:], payload[:end]))

    def take_keys(self, welcome: dict[str, Any]) -> None:
        assert self.pair is not None
        parts = (
            "group key",
            "default",
            self.spec["run"],
            self.name,
            self.session,
            welcome["server"],
        )
        info, suite = (
            "\0".join(("edge-node/v1", *parts)).encode(),
            Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305),
        )
        keys = suite.decrypt(bytes.fromhex(welcome["key"]), self.pair, info)
        if keys[:32] != self.group_key:
            self.group_key, self.node_key = keys[:32], keys[32:]
            self.control.subscribe(self.topic("round"), 1)  # what is retained comes again

    def chunks_topic(self, holder: str, digest: str, size: int) -> str:
        """As the broker knows it."""
        topic = self.topic("blobs", holder, "chunks", digest, str(size))
        return (
            topic.replace(digest, self.derive(self.key_of(topic), "blob", topic).hex())
            if self.encrypted
            else topic
        )

    def chunk_cipher(self, holder: str, digest: str, size: int) -> ChaCha20Poly1305:
        topic = self.topic("blobs", holder, "chunks", digest, str(size))
        return ChaCha20Poly1305(self.derive(self.key_of(topic), "chunk", topic))

    # Signatures

    def seal(self, topic: str, message: dict[str, Any]) -> bytes:
        text = json.dumps(message).encode()
        if self.encrypted and message["type"] == "Contribution":
            text = self.encrypt(topic, text)
        if self.key is None:
            return text
        return b"\x01" + self.key.sign(b"\0".join((b"edge-node/v1", topic.encode(), text))) + text

    def unseal(self, topic: str, payload: bytes) -> dict[str, Any]:
        """What the coordinator says; raises InvalidSignature if somebody else does."""
        if self.coordinator is not None:
            assert payload[:1] == b"\x01"
            self.coordinator.verify(
                payload[1:65], b"\0".join((b"edge-node/v1", topic.encode(), payload[65:]))
            )
            payload = payload[65:]
        message = self.decrypt(topic, payload)
        if self.coordinator is not None and (broadcast := message.get("broadcast")):
            fields = [
                str(broadcast[name]) for name in ("federation", "run", "round", "node", "digest")
            ]
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
            client.subscribe(
                [
                    (topic, 1)
                    for topic in (self.topic("spec"), self.topic("round"), down, coordinator)
                ]
            )
            self.announce()
        elif message is None:
            wants, chunks = (
                self.topic("blobs", self.name, "want/+"),
                self.topic("blobs/coordinator/chunks/+/+"),
            )
            client.subscribe([(wants, 0), (chunks, 0)])
            self.ask(again=True)
        elif client is self.control:
            self.follow(self.unseal(message.topic, message.payload))
            client.ack(message.mid, message.qos)
        elif "/want/" in message.topic:
            self.serve(self.decrypt(message.topic, message.payload))
        else:
            self.take_in(message)

    # Messages

    def announce(self) -> None:
        if self.spec:
            self.appear(online=True)
            key = (
                self.pair.public_key().public_bytes_raw().hex()
                if self.encrypted and self.pair
                else ""
            )
            self.tell(
                "up",
                type="Hello",
                run=self.spec["run"],
                software="foreign",
                round=self.round,
                key=key,
            )
        if self.contribution and not self.encrypted:
            self.tell("up", **self.contribution)

    def follow(self, message: dict[str, Any]) -> None:
        match message.get("type"):
            case "Spec" if not self.spec:
                self.spec = message
                self.announce()
            case "RoundState":
                self.state = message
            case "Welcome" if message["session"] == self.session and self.encrypted:
                self.take_keys(message)
                if self.contribution:  # what was said with another key was said to nobody
                    self.tell("up", **self.contribution)
            # the coordinator is back, and may have missed what was said
            case "Presence" if message["online"]:
                self.announce()
            case "Accepted" if (
                message["session"] == self.session and message["round"] == self.round
            ):
                self.contribution, self.offered = {}, {}
            case "Refusal" if message["session"] == self.session:
                raise AssertionError(message)
        if self.spec and self.spec["run"] == self.state.get("run"):
            status, manifest = self.state["status"], self.state.get("broadcast")
            news = status == "finished" or (status == "open" and self.state["round"] > self.round)
            if news and manifest and self.fetching != manifest:
                self.fetching, self.have, self.asked, self.room = manifest, {}, set(), 2
                self.ask()

    def contribute(self, received: Tensors) -> None:
        shapes = {name: tensor["shape"] for name, tensor in self.spec["tensors"].items()}
        assert {name: list(value.shape) for name, value in received.items()} == shapes
        prefixes = [prefix + "." for prefix in self.spec["sends"]]
        names = [
            name for name in received if any(f"{name}.".startswith(prefix) for prefix in prefixes)
        ]
        blob = save({name: received[name] + np.float32(self.shift) for name in names})
        digest = hashlib.sha256(blob).hexdigest()
        self.round, self.offered = self.state["round"], {digest: blob}
        manifest = self.state["broadcast"] | {
            "node": self.name,
            "digest": digest,
            "size": len(blob),
        }
        self.contribution = {"type": "Contribution", "run": self.spec["run"], "round": self.round}
        self.contribution |= {"weight": self.weight, "blob": manifest}
        self.tell("up", **self.contribution)

    # Blobs

    def serve(self, want: dict[str, Any]) -> None:
        if not want:
            return
        digest, size = want["digest"], want["chunk_size"]
        blob = self.offered.get(digest, b"")
        if max(want["chunks"]) * size < len(blob):
            for index in want["chunks"]:
                data = blob[index * size : (index + 1) * size]
                if self.encrypted:
                    data = self.chunk_cipher(self.name, digest, size).encrypt(
                        struct.pack(">8xI", index), data, None
                    )
                self.data.publish(
                    self.chunks_topic(self.name, digest, size), struct.pack(">I", index) + data
                )

    def ask(self, *, again: bool = False) -> None:
        if not self.fetching:
            return
        if again:
            self.asked.clear()
        size = self.fetching["chunk_size"]
        missing = [
            index
            for index in range(-(-self.fetching["size"] // size))
            if index not in {*self.have, *self.asked}
        ]
        random.shuffle(missing)
        if chunks := missing[: self.room - len(self.asked)]:
            self.asked |= {*chunks}
            topic = self.topic("blobs/coordinator/want", self.name)
            want = {
                "type": "Want",
                "digest": self.fetching["digest"],
                "chunk_size": size,
                "chunks": chunks,
            }
            text = json.dumps(want).encode()
            self.data.publish(topic, self.encrypt(topic, text) if self.encrypted else text)

    def take_in(self, message: mqtt.MQTTMessage) -> None:
        manifest = self.fetching
        if not manifest:
            return
        digest, size = manifest["digest"], manifest["chunk_size"]
        if message.topic != self.chunks_topic("coordinator", digest, size):
            return
        (index,), data = struct.unpack(">I", message.payload[:4]), bytes(message.payload[4:])
        if self.encrypted:
            data = self.chunk_cipher("coordinator", digest, size).decrypt(
                struct.pack(">8xI", index), data, None
            )
        self.have[index] = data
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
