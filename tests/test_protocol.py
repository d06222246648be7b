"""docs/protocol.md is true, and enough to write a node from."""

import hashlib
import inspect
import json
import math
import queue
import random
import re
import secrets
import socket
import struct
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import msgspec
import numpy as np
import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from safetensors.numpy import load, load_file, save

import broker_config
from broker_config import codec, fetch, link, messages, topics, transfer
from broker_config.embedded import find_mosquitto
from edge.line import Failure, Verdict
from tests.plants import CLASSES, FEDERATION, draw, start

PAGE = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()
_PARTS = re.split(r"^#{2,4} (.+)$", PAGE, flags=re.MULTILINE)
SECTIONS = dict(zip(_PARTS[1::2], _PARTS[2::2], strict=True))

# The page is true


def template(topic: Any) -> str:
    """The topic with the names of its parameters in braces."""
    return topic(*(f"{{{name}}}" for name in inspect.signature(topic).parameters))


@pytest.mark.parametrize(
    "topic",
    [f for _, f in inspect.getmembers(topics, inspect.isfunction) if not {"topic", "what"} & {*inspect.signature(f).parameters}],
    ids=lambda topic: topic.__name__,
)
def test_every_topic_is_on_the_page(topic: Any) -> None:
    assert re.search(rf"^\| `{topic.__name__}` +\| `{re.escape(template(topic))}` +\|", SECTIONS["Topics"], re.MULTILINE)


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(messages).values() if inspect.isclass(k) and issubclass(k, msgspec.Struct)] + [Verdict, Failure],
    ids=lambda kind: kind.__name__,
)
def test_every_field_and_its_default_are_on_the_page(kind: type[msgspec.Struct]) -> None:
    if kind in (messages.Message, msgspec.Struct):
        return
    described = dict(re.findall(r"^\| `(\w+)` +\| [^|]+ \| (.+?) +\|", SECTIONS[kind.__name__], re.MULTILINE))
    fields = msgspec.structs.fields(kind)
    assert described == {
        field.encode_name: "–" if field.required else f"`{json.dumps(msgspec.to_builtins(field.default))}`" for field in fields
    }


@pytest.mark.parametrize("kind", messages.AnyMessage.__args__, ids=lambda kind: kind.__name__)
def test_every_message_has_a_whole_example(kind: type[messages.Message]) -> None:
    (example,) = re.findall(r"```json\n(.+?)```", SECTIONS[kind.__name__], re.DOTALL)
    assert json.loads(codec.encode(codec.decode(example.encode(), kind))) == json.loads(example)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("message, must", [codec.MAX_MESSAGE]),
        ("indices in a `Want`", [fetch.MAX_ROOM]),
        ("chunk, usual", [transfer.CHUNK]),
        ("room in a packet", [transfer.CHUNK_ROOM]),
        ("packet that is accepted", [link.LARGEST_PACKET]),
        ("window of outstanding chunks", [fetch.WINDOW]),
        ("chunks that wait at a holder", [transfer.SERVED_AT_ONCE]),
        ("silence before asking again", [fetch.PATIENCE, fetch.LONGEST_SILENCE, fetch.LONGEST_PATIENCE]),
        ("session kept by the broker", [link.SESSION_EXPIRY]),
        ("QoS 1 messages that wait", [link.QUEUED_PUBLISHES]),
    ],
)
def test_the_limits_are_those_of_the_code(what: str, values: list[float]) -> None:
    (row,) = re.findall(rf"^\| {re.escape(what)}.*\| (.+?) +\|$", SECTIONS["Limits"], re.MULTILINE)
    assert re.findall(r"[\d,]*\d", row) == [f"{value:,.0f}" for value in values]


# The page is enough


class ForeignNode:
    """A node written from the page, with nothing of this project: MQTT, JSON, SHA-256 and safetensors.

    It has no images: what it contributes is what it received, plus `shift`.
    """

    def __init__(self, port: int, name: str, version: mqtt.MQTTProtocolVersion, *, weight: float, shift: float):
        self.port, self.name, self.version, self.weight, self.shift = port, name, version, weight, shift
        self.session = secrets.token_hex(8)
        self.spec: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.round = 0  # the last one that it contributed to
        self.contribution: dict[str, Any] = {}  # as long as it is not accepted
        self.offered: dict[str, bytes] = {}
        self.fetching: dict[str, Any] = {}  # a manifest
        self.inbox: queue.Queue[tuple[mqtt.Client, mqtt.MQTTMessage | None]] = queue.Queue()
        self.control, self.data = self.client("control", True), self.client("data", False)

    def client(self, connection: str, persistent: bool) -> mqtt.Client:
        clean = {} if self.version == mqtt.MQTTv5 else {"clean_session": not persistent}
        client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, f"{self.name}/{connection}", protocol=self.version, manual_ack=persistent, **clean
        )
        client.username_pw_set(self.name)
        client.on_connect = lambda *_: self.inbox.put((client, None))
        client.on_message = lambda _client, _data, message: self.inbox.put((client, message))
        return client

    def connect(self, client: mqtt.Client, persistent: bool) -> None:
        options: dict[str, Any] = {}
        if self.version == mqtt.MQTTv5:
            options = {"clean_start": not persistent, "properties": Properties(PacketTypes.CONNECT)}
            if persistent:
                options["properties"].SessionExpiryInterval = 86_400
        client.connect("127.0.0.1", self.port, **options)
        client.loop_start()

    def run(self, dies_in: int | None = None) -> dict[str, np.ndarray] | None:
        """Take part to the end and return the result; or die in the middle of a round."""
        offline = {"type": "Presence", "session": self.session, "online": False}
        self.control.will_set(self.topic("nodes", self.name, "presence"), json.dumps(offline), qos=1, retain=True)
        self.connect(self.data, False)
        self.connect(self.control, True)
        result = None
        while result is None:
            try:
                client, message = self.inbox.get(timeout=1)
            except queue.Empty:
                self.ask(again=True)
                continue
            if message is None:
                self.came_up(client)
            elif client is self.data:
                result = self.receive_data(message)
            else:
                self.receive_control(json.loads(message.payload))
                client.ack(message.mid, message.qos)
                if self.state.get("round") == dies_in:
                    return self.die()
        self.tell("up", type="Finished", run=self.spec["run"])
        self.control.publish(self.topic("nodes", self.name, "presence"), json.dumps(offline), 1, retain=True).wait_for_publish(5)
        self.control.disconnect()
        self.data.disconnect()
        return result

    def die(self) -> None:
        for client in (self.control, self.data):
            client.loop_stop()
            client.socket().close()

    def topic(self, *levels: str) -> str:
        return "/".join(("edge-node/v1/default", *levels))

    def tell(self, topic: str, retain: bool = False, **message: Any) -> None:
        self.control.publish(self.topic("nodes", self.name, topic), json.dumps({"session": self.session, **message}), 1, retain)

    def came_up(self, client: mqtt.Client) -> None:
        if client is self.data:
            client.subscribe([(self.topic("blobs", self.name, "want", "+"), 0), (self.topic("blobs/coordinator/chunks/+/+"), 0)])
            self.ask(again=True)
        else:
            mine = self.topic("nodes", self.name, "down"), self.topic("nodes/coordinator/presence")
            client.subscribe([(topic, 1) for topic in (self.topic("spec"), self.topic("round"), *mine)])
            self.announce()

    def announce(self) -> None:
        if self.spec:
            self.tell("presence", retain=True, type="Presence", online=True)
            self.tell("up", type="Hello", run=self.spec["run"], software="foreign")
            if self.contribution:
                self.tell("up", **self.contribution)

    def receive_control(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "Spec" if not self.spec:
                self.spec = message
                self.announce()
            case "RoundState":
                self.state = message
            case "Accepted" if message["session"] == self.session and message["round"] == self.round:
                self.contribution, self.offered = {}, {}
            case "Refusal" if message["session"] == self.session:
                raise AssertionError(message)
        if self.spec and self.state.get("run") == self.spec["run"]:
            self.pursue()

    def pursue(self) -> None:
        status, manifest = self.state["status"], self.state["broadcast"]
        wanted = status == "finished" or (status == "open" and self.state["round"] > self.round)
        if wanted and self.fetching != manifest:
            self.fetching, self.have, self.asked, self.room = manifest, {}, set(), 2
            self.ask()

    def ask(self, again: bool = False) -> None:
        if not self.fetching:
            return
        if again:
            self.asked.clear()
        size, chunk_size = self.fetching["size"], self.fetching["chunk_size"]
        missing = [i for i in range(math.ceil(size / chunk_size)) if i not in self.have and i not in self.asked]
        random.shuffle(missing)
        if chunks := missing[: self.room - len(self.asked)]:
            self.asked |= set(chunks)
            want = {"type": "Want", "digest": self.fetching["digest"], "chunk_size": chunk_size, "chunks": chunks}
            self.data.publish(self.topic("blobs/coordinator/want", self.name), json.dumps(want))

    def receive_data(self, message: mqtt.MQTTMessage) -> dict[str, np.ndarray] | None:
        """Serve a Want, or take in a chunk; return the federation's result when it is there."""
        if "/want/" in message.topic:
            self.serve(json.loads(message.payload))
        elif self.fetching and message.topic.endswith(f"/{self.fetching['digest']}/{self.fetching['chunk_size']}"):
            self.have[struct.unpack(">I", message.payload[:4])[0]] = message.payload[4:]
            self.asked &= set(range(1 << 20)) - set(self.have)
            self.room += 1
            self.ask()
            blob = b"".join(self.have[index] for index in sorted(self.have))
            if len(blob) == self.fetching["size"]:
                assert hashlib.sha256(blob).hexdigest() == self.fetching["digest"]
                self.fetching = {}
                if self.state["status"] == "finished":
                    return load(blob)
                self.contribute(load(blob))
        return None

    def contribute(self, received: dict[str, np.ndarray]) -> None:
        assert {name: list(value.shape) for name, value in received.items()} == {
            name: tensor["shape"] for name, tensor in self.spec["tensors"].items()
        }
        selected = [n for n in received if any(n == prefix or n.startswith(prefix + ".") for prefix in self.spec["sends"])]
        blob = save({name: received[name] + np.float32(self.shift) for name in selected})
        digest = hashlib.sha256(blob).hexdigest()
        self.round, self.offered = self.state["round"], {digest: blob}
        manifest = self.state["broadcast"] | {"node": self.name, "digest": digest, "size": len(blob)}
        self.contribution = {
            "type": "Contribution", "run": self.spec["run"], "round": self.round, "weight": self.weight, "blob": manifest
        }  # fmt: skip
        self.tell("up", **self.contribution)

    def serve(self, want: dict[str, Any]) -> None:
        blob, size = self.offered.get(want["digest"], b""), want["chunk_size"]
        if max(want["chunks"]) * size < len(blob):
            for index in want["chunks"]:
                chunk = struct.pack(">I", index) + blob[index * size : (index + 1) * size]
                self.data.publish(self.topic("blobs", self.name, "chunks", want["digest"], str(size)), chunk)


class Observer:
    """Overhears everything."""

    def __init__(self, port: int):
        self.messages: list[dict[str, Any]] = []
        self.chunks: dict[str, dict[int, bytes]] = defaultdict(dict)  # by digest and index
        self._heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        self._client.username_pw_set("observer")
        self._client.on_message = self._note
        self._client.on_connect = lambda client, *_: client.subscribe("edge-node/#", 1)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def _note(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        if "/chunks/" in message.topic:
            self.chunks[message.topic.split("/")[-2]][int.from_bytes(message.payload[:4], "big")] = message.payload[4:]
        else:
            self._heard.put({"topic": message.topic, **json.loads(message.payload)})

    def wait_for(self, **facts: Any) -> None:
        """Return when a message with these fields has been heard."""
        while not any(facts.items() <= message.items() for message in self.messages[-1:]):
            self.messages.append(self._heard.get(timeout=30))

    def contributions(self, round_: int) -> list[tuple[float, dict[str, np.ndarray]]]:
        """Weight and tensors of each contribution to a round."""
        made = {m["topic"]: m for m in self.messages if m["type"] == "Contribution" and m["round"] == round_}
        return [(m["weight"], self.blob(m["blob"])) for m in made.values()]

    def blob(self, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
        chunks = self.chunks[manifest["digest"]]
        return load(b"".join(chunks[index] for index in sorted(chunks)))


def mean(spec: dict[str, Any], contributions: list[tuple[float, dict[str, np.ndarray]]]) -> dict[str, bytes]:
    """The page's exact mean for `fedavg`, as bytes by tensor."""
    weights = [round(min(weight, 4096) / 4096 * 2**24) for weight, _ in contributions]
    found = {}
    for name, tensor in spec["tensors"].items():
        scale = tensor["scale"]
        total = sum(
            np.rint(values[name].astype(np.float64) * weight * 2.0 ** (scale - 24)).astype(np.int64)
            for weight, (_, values) in zip(weights, contributions, strict=True)
        )
        found[name] = np.float32(np.float64(total) / float(sum(weights)) * 2.0 ** (24 - scale)).tobytes()
    return found


def as_bytes(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[int]:
    """The port of a mosquitto with the page's access list, and an observer who may read everything."""
    (access,) = re.findall(r"```acl\n(.+?)```", SECTIONS["Topics"], re.DOTALL)
    (tmp_path / "acl").write_text(f"{access}\nuser observer\ntopic read edge-node/#\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = Template((Path(broker_config.__file__).parent / "mosquitto" / "embedded.conf").read_text())
    fields = {"host": "127.0.0.1", "port": port, "max_packet": 128 * 1024, "log": tmp_path / "broker.log"}
    (tmp_path / "conf").write_text(configuration.substitute(fields) + f"\nacl_file {tmp_path / 'acl'}\n")
    broker = subprocess.Popen([str(find_mosquitto()), "-c", str(tmp_path / "conf")])
    try:
        yield _when_it_listens(port)
    finally:
        broker.terminate()
        broker.wait(5)


def _when_it_listens(port: int) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return port
        time.sleep(0.02)
    raise AssertionError("mosquitto does not start")


def test_a_node_written_from_the_page_takes_part_dies_and_comes_back(guarded: int, tmp_path: Path) -> None:
    """Beside a real node, behind the page's access list, with MQTT 5 and then 3.1.1; and the means are the page's."""
    observer = Observer(guarded)
    images = draw(tmp_path / "images", 3, 0)
    processes = [
        start(
            "coordinate", f"mqtt://coordinator@127.0.0.1:{guarded}", "--classes", ",".join(CLASSES), "--nodes", 2,
            "--method", "fedavg", "--chunk-size", 40, "--state", tmp_path / "coordinator", *FEDERATION,
            log=tmp_path / "coordinator.log",
        ),
        start(
            "join", f"mqtt://plant-a@127.0.0.1:{guarded}", "--name", "plant-a", "--data", images,
            "--state", tmp_path / "plant-a", log=tmp_path / "plant-a.log",
        ),
    ]  # fmt: skip
    try:
        ForeignNode(guarded, "foreign", mqtt.MQTTv5, weight=20, shift=0.01).run(dies_in=2)
        observer.wait_for(topic="edge-node/v1/default/nodes/foreign/presence", online=False)
        result = ForeignNode(guarded, "foreign", mqtt.MQTTv311, weight=3, shift=-0.5).run()
        assert [process.wait(30) for process in processes] == [0, 0]
        observer.wait_for(topic="edge-node/v1/default/nodes/coordinator/presence", online=False)
    finally:
        for process in processes:
            process.kill()
    spec = next(message for message in observer.messages if message["type"] == "Spec")
    second = next(m["broadcast"] for m in observer.messages if m["type"] == "RoundState" and m["round"] == 2)
    assert [len(observer.contributions(round_)) for round_ in (1, 2)] == [2, 2]
    assert as_bytes(observer.blob(second)) == mean(spec, observer.contributions(1))
    final = load_file(tmp_path / "coordinator" / "global.safetensors")
    assert as_bytes(final) == mean(spec, observer.contributions(2)) == as_bytes(result)
    assert {m["type"] for m in observer.messages if "/nodes/plant-a/" in m["topic"]} == {
        "Presence", "Hello", "Welcome", "Contribution", "Accepted", "Finished"
    }  # fmt: skip
