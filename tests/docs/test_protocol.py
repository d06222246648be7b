"""docs/protocol.md is true, and enough to write a node from."""

import inspect
import json
import math
import queue
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from typing import Any

import msgspec
import numpy as np
import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from safetensors.numpy import load, load_file

import broker_config
from broker_config.broker.embedded import find_mosquitto
from broker_config.mqtt import client as mqtt_client
from broker_config.protocol import codec, messages, topics
from broker_config.security import access_list as access
from broker_config.transfer import blob_transfer, download, send_queue
from edge.inference.outcomes import Failure, Notice, Verdict
from edge_node.extensions.vfl import frames
from edge_node.extensions.vfl import messages as vfl_messages
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.kind import KIND
from tests.support.foreign_node import ForeignNode, Tensors
from tests.support.paths import REPOSITORY
from tests.support.plants import CLASSES, FEDERATION, draw, run, start
from tests.support.ports import accepts_connections, free_port
from tests.support.waiting import wait_until
from trainer.federation.server.aggregation import (
    FixedPointSum,
    Influence,
    clipped_mean,
    measure_updates,
)
from trainer.federation.server.robust_rules import InMemory

PAGE = (REPOSITORY / "docs" / "protocol.md").read_text()
_PARTS = re.split(r"^#{2,4} (.+)$", PAGE, flags=re.MULTILINE)
SECTIONS = dict(zip(_PARTS[1::2], _PARTS[2::2], strict=True))

# The page is true


def template(topic: Callable[..., str]) -> str:
    """The topic with the names of its parameters in braces."""
    return topic(*(f"{{{name}}}" for name in inspect.signature(topic).parameters))


@pytest.mark.parametrize(
    "topic",
    [
        f
        for room in (topics, vfl_topics)
        for _, f in inspect.getmembers(room, inspect.isfunction)
        if not {"topic", "name"} & {*inspect.signature(f).parameters}
    ],
    ids=lambda topic: topic.__name__,
)
def test_every_topic_is_on_the_page(topic: Callable[..., str]) -> None:
    assert re.search(
        rf"^\| `{topic.__name__}` +\| `{re.escape(template(topic))}` +\|",
        SECTIONS["Topics"],
        re.MULTILINE,
    )


def default(field: msgspec.structs.FieldInfo) -> object:
    made: object = (
        field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    )
    return made


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for room in (messages, vfl_messages, frames)
        for kind in vars(room).values()
        if inspect.isclass(kind)
        and issubclass(kind, msgspec.Struct)
        and kind.__struct_fields__
        and kind not in (frames.Frame, messages.CommonSpec)
        and kind.__module__ == room.__name__
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_and_its_default_are_on_the_page(kind: type[msgspec.Struct]) -> None:
    described = dict(
        re.findall(r"^\| `(\w+)` +\| [^|]+ \| (.+?) +\|", SECTIONS[kind.__name__], re.MULTILINE)
    )
    fields = msgspec.structs.fields(kind)
    assert described == {
        field.encode_name: "–"
        if field.required
        else f"`{json.dumps(msgspec.to_builtins(default(field)))}`"
        for field in fields
    }


@pytest.mark.parametrize(
    ("kind", "section"),
    [(kind, kind.__name__) for kind in messages.AnyMessage.__args__]
    + [(kind, "Verdicts of a line") for kind in (Verdict, Failure, Notice)]
    + [(kind, kind.__name__) for kind in (KIND.spec, KIND.overview, *KIND.others)],
)
def test_every_message_has_an_example_with_all_its_fields(
    kind: type[msgspec.Struct], section: str
) -> None:
    examples = re.findall(r"```json\n(.+?)```", SECTIONS[section], re.DOTALL)
    (example,) = [example for example in examples if json.loads(example)["type"] == kind.__name__]
    assert json.loads(msgspec.json.encode(msgspec.json.decode(example, type=kind))) == json.loads(
        example
    )


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("message, must", [codec.MAX_MESSAGE]),
        ("indices in a `Want`", [download.MAX_CHUNKS]),
        ("chunk, usual", [blob_transfer.CHUNK]),
        ("room in a packet", [blob_transfer.CHUNK_OVERHEAD]),
        ("packet that is accepted", [mqtt_client.LARGEST_PACKET]),
        ("window of outstanding chunks", [download.WINDOW]),
        ("blobs that are fetched at a time", [blob_transfer.MAX_DOWNLOADS]),
        ("chunks that wait at a holder", [send_queue.MAX_QUEUED]),
        (
            "silence before asking again",
            [download.MIN_TIMEOUT, download.MAX_RETRY_INTERVAL, download.MAX_TIMEOUT],
        ),
        ("session kept by the broker", [mqtt_client.SESSION_EXPIRY]),
        ("QoS 1 messages that wait", [mqtt_client.QUEUED_PUBLISHES]),
    ],
)
def test_the_limits_are_those_of_the_code(what: str, values: list[float]) -> None:
    (row,) = re.findall(rf"^\| {re.escape(what)}.*\| (.+?) +\|$", SECTIONS["Limits"], re.MULTILINE)
    assert re.findall(r"[\d,]*\d", row) == [f"{value:,.0f}" for value in values]


def test_the_access_list_is_that_of_the_code() -> None:
    assert f"```acl\n{access.acl('+')}```" in SECTIONS["Topics"]


# The exact mean


def scale(nodes: int, initial: np.ndarray) -> int:
    """The page's scale of a tensor."""
    return (
        62
        - math.ceil(math.log2(nodes))
        - 12
        - math.ceil(math.log2(max(np.abs(initial).max(), 0.25)))
    )


def mean(
    scales: dict[str, int], contributions: list[tuple[float, Tensors]], cap: float
) -> dict[str, bytes]:
    """The page's exact mean, as bytes by tensor."""
    weights = [max(1, round(weight / cap * 2**24)) for weight, _ in contributions]
    found = {}
    for name, s in scales.items():
        total = sum(
            np.rint(values[name].astype(np.float64) * weight * 2.0 ** (s - 24)).astype(np.int64)
            for weight, (_, values) in zip(weights, contributions, strict=True)
        )
        found[name] = np.float32(
            np.float64(total) / float(sum(weights)) * 2.0 ** (24 - s)
        ).tobytes()
    return found


def as_bytes(tensors: Tensors) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_mean_is_the_pages(seed: int) -> None:
    """Also of values so small that the sums' rounding shows, and of weights that need rounding."""
    generator = np.random.default_rng(seed)
    nodes, cap = int(generator.integers(2, 9)), 1.3
    contributions = [
        (float(weight), {"a": (10.0 ** generator.uniform(-16, 0, 500)).astype(np.float32)})
        for weight in generator.uniform(1e-3, cap, nodes)
    ]
    s = scale(nodes, contributions[0][1]["a"])
    sums = FixedPointSum({"a": messages.TensorSpec((500,), s)}, nodes, cap)
    for weight, tensors in contributions:
        sums.add(tensors.items(), weight)
    assert as_bytes(sums.mean()) == mean({"a": s}, contributions, cap)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7])
def test_the_clipped_mean_is_the_pages(nodes: int) -> None:
    generator = np.random.default_rng(nodes)
    cap, broadcast = (
        1.3,
        {
            "a": generator.normal(size=(20, 5)).astype(np.float32),
            "b": np.float32(generator.normal()),
        },
    )
    contributions = [
        (
            float(generator.uniform(1e-3, cap)),
            {
                name: np.asarray(b + generator.normal(0, 0.1, b.shape), np.float32)
                for name, b in broadcast.items()
            },
        )
        for _ in range(nodes)
    ]

    def norm(update: np.ndarray) -> float:
        return float(np.sqrt(np.square(update.astype(np.float64)).sum()))

    counted = contributions
    if nodes > 2:
        w = np.median([weight for weight, _ in contributions])
        norms = {
            n: [norm(x[n].astype(np.float64) - b) for _, x in contributions]
            for n, b in broadcast.items()
        }
        p = [
            {n: min(1, np.median(norms[n]) / norms[n][k]) for n in broadcast} for k in range(nodes)
        ]
        counted = [
            (
                min(weight, float(w)),
                {
                    n: ((1 - p[k][n]) * b.astype(np.float64) + p[k][n] * x[n]).astype(np.float32)
                    if p[k][n] < 1
                    else x[n]
                    for n, b in broadcast.items()
                },
            )
            for k, (weight, x) in enumerate(contributions)
        ]
    scales = {name: scale(nodes, value) for name, value in broadcast.items()}
    sums = FixedPointSum(
        {n: messages.TensorSpec(b.shape, scales[n]) for n, b in broadcast.items()}, nodes, cap
    )
    sources = {f"node-{k}": InMemory(tensors) for k, (_, tensors) in enumerate(contributions)}
    influences = {
        f"node-{k}": Influence(weight, measure_updates(tensors.items(), broadcast))
        for k, (weight, tensors) in enumerate(contributions)
    }
    assert as_bytes(clipped_mean(sums, sources, influences, broadcast)[0]) == mean(
        scales, counted, cap
    )


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_values_are_refused_from_the_pages_bound_on(nodes: int) -> None:
    s = scale(nodes, np.ones(1, np.float32))
    bound = np.float32(2.0 ** (62 - s) / 2 ** math.ceil(math.log2(nodes)))
    sums = FixedPointSum({"a": messages.TensorSpec((1,), s)}, nodes, 1.0)
    sums.validate([("a", np.array([-bound]))])
    with pytest.raises(ValueError, match="beyond"):
        sums.validate([("a", np.array([np.nextafter(bound, np.float32(np.inf))]))])


# The page is enough


class Observer:
    """Overhears everything."""

    def __init__(self, port: int):
        self.messages: list[dict[str, Any]] = []
        self.chunks: dict[str, dict[int, bytes]] = defaultdict(dict)  # by digest and index
        self._heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2)
        self._client.username_pw_set("observer")
        self._client.on_message = self._note
        self._client.on_connect = lambda client, *_: client.subscribe("edge-node/#", 1)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def _note(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        if "/chunks/" in message.topic:
            self.chunks[message.topic.split("/")[-2]][
                int.from_bytes(message.payload[:4], "big")
            ] = bytes(message.payload[4:])
        else:
            self._heard.put({"topic": message.topic, **json.loads(message.payload)})

    def wait_for(self, **facts: Any) -> None:
        """Return when a message with these fields has been heard."""
        while True:
            self.messages.append(self._heard.get(timeout=60))
            if facts.items() <= self.messages[-1].items():
                return

    def contributions(self, round_: int) -> list[tuple[float, Tensors]]:
        """Weight and tensors of each contribution to a round."""
        made = {
            m["topic"]: m
            for m in self.messages
            if m["type"] == "Contribution" and m["round"] == round_
        }
        return [(m["weight"], self.blob(m["blob"])) for m in made.values()]

    def blob(self, manifest: dict[str, Any]) -> Tensors:
        chunks = self.chunks[manifest["digest"]]
        tensors: Tensors = load(b"".join(chunks[index] for index in sorted(chunks)))
        return tensors


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[int]:
    """The port of a mosquitto with the page's access list,
    and an observer who may read everything.
    """
    (access,) = re.findall(r"```acl\n(.+?)```", SECTIONS["Topics"], re.DOTALL)
    (tmp_path / "acl").write_text(f"{access}\nuser observer\ntopic read edge-node/#\n")
    port = free_port()
    configuration = Template(
        (Path(broker_config.__file__).parent / "broker" / "mosquitto" / "embedded.conf").read_text()
    )
    fields = {
        "host": "127.0.0.1",
        "port": port,
        "max_packet": 128 * 1024,
        "log": tmp_path / "broker.log",
    }
    (tmp_path / "conf").write_text(
        configuration.substitute(fields) + f"\nacl_file {tmp_path / 'acl'}\n"
    )
    broker = subprocess.Popen([str(find_mosquitto()), "-c", str(tmp_path / "conf")])
    try:
        wait_until(lambda: accepts_connections(port), said=lambda: "mosquitto does not start")
        yield port
    finally:
        broker.terminate()
        broker.wait(60)


@pytest.mark.slow
def test_a_node_written_from_the_page_takes_part_dies_and_comes_back(
    guarded: int, tmp_path: Path
) -> None:
    """Beside a real node, behind the page's access list, with MQTT 5 and then 3.1.1;
    and the means are the page's.
    """
    observer = Observer(guarded)
    images = draw(tmp_path / "images", 10, 0)
    processes = [
        start(
            "coordinate",
            f"mqtt://coordinator@127.0.0.1:{guarded}",
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            *FEDERATION,
            "--method",
            "fedavg",
            "--codec",
            "none",
            "--state",
            tmp_path / "coordinator",
            log=tmp_path / "coordinator.log",
            module="tests.support.small_chunks",
        ),
        start(
            "join",
            f"mqtt://plant-a@127.0.0.1:{guarded}",
            "--name",
            "plant-a",
            "--data",
            images,
            "--state",
            tmp_path / "plant-a",
            log=tmp_path / "plant-a.log",
        ),
    ]
    try:
        ForeignNode(guarded, "foreign", MQTTProtocolVersion.MQTTv5, weight=20, shift=0.01).run(
            dies_in=2
        )
        observer.wait_for(topic="edge-node/v1/default/nodes/foreign/presence", online=False)
        result = ForeignNode(
            guarded, "foreign", MQTTProtocolVersion.MQTTv311, weight=3, shift=-0.5
        ).run()
        assert [process.wait(60) for process in processes] == [0, 0]
        observer.wait_for(topic="edge-node/v1/default/nodes/coordinator/presence", online=False)
    finally:
        for process in processes:
            process.kill()
    spec = next(message for message in observer.messages if message["type"] == "Spec")
    scales = {name: tensor["scale"] for name, tensor in spec["tensors"].items()}
    states = [message for message in observer.messages if message["type"] == "RoundState"]
    broadcasts = {
        state["round"]: state["broadcast"] for state in states if state["status"] == "open"
    }
    assert scales == {name: scale(2, value) for name, value in observer.blob(broadcasts[1]).items()}
    assert [len(observer.contributions(round_)) for round_ in (1, 2)] == [2, 2]
    assert as_bytes(observer.blob(broadcasts[2])) == mean(
        scales, observer.contributions(1), cap=4096
    )
    final = load_file(tmp_path / "coordinator" / "global.safetensors")
    assert as_bytes(final) == mean(scales, observer.contributions(2), cap=4096) == as_bytes(result)
    assert {m["type"] for m in observer.messages if "/nodes/plant-a/" in m["topic"]} == {
        "Presence",
        "Hello",
        "Welcome",
        "Contribution",
        "Accepted",
        "Finished",
    }


@pytest.mark.parametrize(
    ("user", "reads"), [("coordinator", True), ("monitor", True), ("plant-a", False)]
)
def test_how_the_nodes_are_doing_is_for_the_coordinator_and_a_monitor_only(
    user: str, reads: bool, guarded: int
) -> None:
    (spec,) = re.findall(r"```json\n(.+?)```", SECTIONS["Spec"], re.DOTALL)
    (overview,) = re.findall(r"```json\n(.+?)```", SECTIONS["Overview"], re.DOTALL)
    coordinator = mqtt.Client(CallbackAPIVersion.VERSION2)
    coordinator.username_pw_set("coordinator")
    coordinator.connect("127.0.0.1", guarded)
    coordinator.loop_start()
    for topic, message in ((topics.spec("steel"), spec), (topics.status("steel"), overview)):
        coordinator.publish(topic, message, 1, retain=True).wait_for_publish(60)
    shown = run("status", f"mqtt://{user}@127.0.0.1:{guarded}", COLUMNS="120").stdout
    coordinator.disconnect()
    assert ("sending 26%" in shown) == reads
    assert ("not read edge-node/v1/steel/status" in shown) != reads
