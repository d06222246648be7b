"""Members of the version before masks and noise were bound to the spec, played from a recording.

`tests/data/unbound_version.tar.xz` holds what they have said, byte for byte. It was recorded from
the code of commit 3ae7504d: its coordinator and its three nodes
(`tests.support.threaded_federation` of that commit, with its tiny encoder) took part in three
federations over a mosquitto, while a subscriber wrote down every message. Of `open` there is all
that plant-a and the coordinator said of one round of FedAvg. `private` and `masked` were stopped
before round 1: of these there is what the coordinator announced and what plant-a said first.
Signatures are left out.

A player says it again at the right moment. It changes nothing but the session that an answer of
the coordinator is for, since that is the other side's.
"""

import json
import struct
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import paho.mqtt.client as paho

from tests.support.foreign_node import parse
from tests.support.paths import REPOSITORY

NODE = "plant-a"


def read_recorded(name: str) -> bytes:
    """Return a file of the recording: `open/spec.json`, `blobs/DIGEST`."""
    with tarfile.open(REPOSITORY / "tests" / "data" / "unbound_version.tar.xz") as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


class RecordedMember:
    """What both players do: speak for one member of a federation, and serve its blobs."""

    def __init__(self, url: str, federation: str, name: str):
        self.federation = federation
        self.name = name
        self.heard: list[dict[str, Any]] = []
        broker = httpx.URL(url)
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, f"recorded/{name}")
        self._client.on_connect = lambda *_: self.begin()
        self._client.on_message = lambda _client, _data, message: self._receive(message)
        self._client.connect(broker.host, broker.port)

    def begin(self) -> None:
        """Subscribe, and say what comes first."""
        raise NotImplementedError

    def answer(self, message: dict[str, Any], sender: str) -> None:
        """Answer a message of a node, the `sender`, or of the coordinator."""
        raise NotImplementedError

    def topic(self, *levels: str) -> str:
        return "/".join(("edge-node/v1", self.federation, *levels))

    def subscribe(self, *topics: str) -> None:
        wants = self.topic("blobs", self.name, "want", "+")
        self._client.subscribe([(each, 1) for each in (*topics, wants)])

    def say(self, topic: str, file: str, *, retain: bool = False, **changes: Any) -> None:
        """Publish a recorded message, with these changes."""
        payload = read_recorded(f"{self.federation}/{file}.json")
        if changes:
            payload = json.dumps(json.loads(payload) | changes).encode()
        self._client.publish(topic, self.seal(topic, payload), 1, retain=retain)

    def seal(self, topic: str, payload: bytes) -> bytes:
        """Return the payload as it is published, which may be signed."""
        return payload

    def unseal(self, payload: bytes) -> bytes:
        """Return the payload without a signature."""
        return payload[65:] if payload[:1] == b"\x01" else payload

    def _receive(self, message: paho.MQTTMessage) -> None:
        if not message.payload:
            return
        said = parse(self.unseal(message.payload))
        self.heard.append(said)
        if said.get("type") == "Want":
            self._serve(said)
        else:
            self.answer(said, message.topic.removesuffix("/up").rpartition("/")[2])

    def _serve(self, want: dict[str, Any]) -> None:
        digest = want["digest"]
        size = want["chunk_size"]
        blob = read_recorded(f"blobs/{digest}")
        for index in want["chunks"]:
            data = blob[index * size : (index + 1) * size]
            topic = self.topic("blobs", self.name, "chunks", digest, str(size))
            self._client.publish(topic, struct.pack(">I", index) + data)

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Take part meanwhile."""
        self._client.loop_start()
        try:
            yield
        finally:
            self._client.disconnect()
            self._client.loop_stop()


class RecordedNode(RecordedMember):
    """The node; with a `signer` of today's kits, which are those of that version."""

    def __init__(self, url: str, federation: str, signer: Any = None):
        super().__init__(url, federation, NODE)
        self._signer = signer
        self._has_contributed = False
        self._up = self.topic("nodes", NODE, "up")

    def seal(self, topic: str, payload: bytes) -> bytes:
        return self._signer.sign(topic, payload) if self._signer else payload

    def begin(self) -> None:
        self.subscribe(self.topic("nodes", NODE, "down"), self.topic("round"))
        self.say(self.topic("nodes", NODE, "presence"), "presence", retain=True)
        self.say(self._up, "hello")

    def answer(self, message: dict[str, Any], sender: str) -> None:
        status = message.get("status")
        if status == "open" and not self._has_contributed:
            self._has_contributed = True
            self.say(self._up, "contribution")
        elif status == "finished":
            self.say(self._up, "finished")


class RecordedCoordinator(RecordedMember):
    """The coordinator, with one node of another version."""

    def __init__(self, url: str, federation: str):
        super().__init__(url, federation, "coordinator")

    def begin(self) -> None:
        self.subscribe(self.topic("nodes", "+", "up"))
        self.say(self.topic("nodes/coordinator/presence"), "coordinator-presence", retain=True)
        self.say(self.topic("spec"), "spec", retain=True)
        self.say(self.topic("round"), "round", retain=True)

    def answer(self, message: dict[str, Any], sender: str) -> None:
        down = self.topic("nodes", sender, "down")
        if message["type"] == "Hello":
            self.say(down, "welcome", session=message["session"])
        elif message["type"] == "Contribution":
            self.say(down, "accepted", session=message["session"])
            self.say(self.topic("round"), "round-finished", retain=True)
