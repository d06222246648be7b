"""Real traffic of a small federation, and hostile frames made of it."""

import json
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from safetensors.numpy import save

from broker_config.broker.embedded import start_broker
from broker_config.protocol.messages import TensorSpec
from tests.support.foreign_node import ForeignNode
from tests.support.plants import CLASSES, start
from trainer.models.named_tensors import strip_prefix

Json = dict[str, Any]
SHAPES = {
    "encoder.deep.weight": (16, 3, 3, 3),
    "encoder.norm.bias": (16,),
    "encoder.scale": (),
    "encoder.none": (0, 4),
}
SENT = {name: TensorSpec(shape, 40) for name, shape in SHAPES.items()}  # what a contribution holds


class Frame(NamedTuple):
    """An MQTT message."""

    topic: str
    payload: bytes


def small_encoder() -> dict[str, np.ndarray]:
    """An initial encoder of model `small`, drawn without torch."""
    random, width = np.random.default_rng(0), (3, 16, 32, 64, 64)
    encoder = {}
    for layer, (above, below) in enumerate(pairwise(width)):
        encoder[f"encoder.features.{3 * layer}.weight"] = random.normal(
            0, 0.1, (below, above, 3, 3)
        )
        encoder[f"encoder.features.{3 * layer + 1}.weight"] = np.ones(below)
        encoder |= {f"encoder.features.{3 * layer + norm}.bias": np.zeros(below) for norm in (0, 1)}
    return {name: value.astype(np.float32) for name, value in encoder.items()}


def small_weights(path: Path) -> Path:
    """The same as a file, so that a coordinator starts fast."""
    path.write_bytes(save(strip_prefix("encoder", small_encoder())))
    return path


def record(folder: Path) -> list[Frame]:
    """All that passes a broker while two nodes take part in a federation of two rounds,
    in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frames: list[Frame] = []
    with start_broker(folder / "broker", kind="mosquitto") as broker:
        tap = mqtt.Client(CallbackAPIVersion.VERSION2, "tap", protocol=MQTTProtocolVersion.MQTTv5)
        tap.on_message = lambda _client, _data, message: frames.append(
            Frame(message.topic, message.payload)
        )
        subscribed = threading.Event()
        tap.on_subscribe = lambda *_: subscribed.set()
        tap.connect("127.0.0.1", broker.port)
        tap.subscribe("#", 1)
        tap.loop_start()
        assert subscribed.wait(60)
        coordinator = start(
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--model",
            "small",
            "--rounds",
            2,
            "--method",
            "fedavg",
            "--weights",
            small_weights(folder / "weights"),
            "--state",
            folder / "state",
            log=folder / "log",
            module="tests.support.small_chunks",
        )
        nodes = [
            ForeignNode(broker.port, name, MQTTProtocolVersion.MQTTv5, weight=5, shift=0.1)
            for name in "ab"
        ]
        threads = [threading.Thread(target=node.run, daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        try:
            assert coordinator.wait(60) == 0, (folder / "log").read_text()
        finally:
            coordinator.kill()
        for thread in threads:
            thread.join(60)
        tap.disconnect()
        tap.loop_stop()
    return [frame for frame in frames if frame.payload]


def is_message(frame: Frame) -> bool:
    """Whether it carries JSON."""
    return frame.payload.startswith(b"{")


# Mutation

HUGE = (
    -1,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**40,
    -(1 << 70),
    1 << 40,
    1 << 30,
    1_000_001,
)
TEXTS = (
    "",
    "\x00",
    "\x1b[2J",
    "..",
    "../../etc/passwd",
    "ä" * 64,
    "x" * 65,
    "f" * 64,
    "F" * 64,
    "0" * 16,
    "\u202e",
)
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1e-999",
    "-0.0",
    "1.0",
    "9" * 400,
    "1E+",
    "01",
    "\\ud800",
    "'a'",
    "",
)
PATHS = (
    "spec",
    "round",
    "nodes/a/up",
    "nodes/a/presence",
    "nodes/b/up",
    "nodes/coordinator/up",
    "nodes/ü/up",
)
_MARK = "\u2603"


class Mutator:
    """Makes hostile frames of real ones; from the same random numbers always the same."""

    def __init__(self, frames: Sequence[Frame], random: Random):
        self.frames, self.random = frames, random
        self._messages = [frame for frame in frames if is_message(frame)]
        self._chunks = [frame for frame in frames if not is_message(frame)]
        self._blob = save({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})

    def frame(self) -> Frame:
        """Any hostile frame, under its topic or that of another."""
        return self.message() if self.random.random() < 0.8 else self.chunk()

    def message(self) -> Frame:
        """A message that is not, or not quite, one; now and then on another's topic."""
        random = self.random
        topic, payload = random.choice(self._messages)
        change = random.choice((self._text, self._values, self._values, self._values, self._bytes))
        if random.random() < 0.2:
            topic = random.choice(self._messages).topic
        return Frame(topic, change(payload))

    def current(self, payload: bytes, **known: Any) -> bytes:
        """The message as the federation's present expects it, mostly:
        `known` are fields and their values.
        """
        try:
            message = json.loads(payload)
            for part in (message, message.get("blob") or {}):
                part |= {
                    key: known[key]
                    for key in known.keys() & part.keys()
                    if self.random.random() < 0.9
                }
            return json.dumps(message).encode()
        except (ValueError, TypeError, RecursionError, AttributeError):  # it is none any more
            return payload

    def chunk(self) -> Frame:
        """A chunk with another index, length or content."""
        random = self.random
        topic, payload = random.choice(self._chunks)
        index = struct.pack(
            ">I",
            random.choice((0, 1, 2**32 - 1, 2**31, random.getrandbits(32), random.randrange(20))),
        )
        return Frame(
            topic,
            random.choice((index + payload[4:], self._bytes(payload), index, payload[:3], payload)),
        )

    def blob(self) -> bytes:
        """A file of tensors that is not quite as promised."""
        length = struct.unpack("<Q", self._blob[:8])[0]
        header, data = json.loads(self._blob[8 : 8 + length]), self._blob[8 + length :]
        match self.random.randrange(4):
            case 0:
                return self._bytes(self._blob)
            case 1:
                return (
                    struct.pack("<Q", abs(self.random.choice(HUGE)) & (2**64 - 1)) + self._blob[8:]
                )
            case 2:
                text = self._values(json.dumps(header).encode())
            case _:
                text = json.dumps(self._misled(header, len(data))).encode()
        return struct.pack("<Q", len(text)) + text + data

    def _misled(self, header: Json, size: int) -> Json:
        """A header whose entries are lies that hang together better."""
        random = self.random
        for name in random.sample(sorted(header), random.randint(1, 2)):
            entry = header[name]
            match random.randrange(7):
                case 0:
                    entry["dtype"] = random.choice(
                        ("F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "F4", "C64", "U64")
                    )
                case 1:
                    entry["shape"] = random.choice(
                        ([], [0], [1 << 62, 4], [-1], entry["shape"][::-1], [1] * 1000)
                    )
                case 2:
                    entry["data_offsets"] = sorted(
                        random.choices((0, 4, size, size + 1, 1 << 62, 2**64 - 1), k=2)
                    )
                case 3:
                    header[
                        random.choice(("encoder.\x00", "e" * random.randint(1, 20_000), "\x1b[2J"))
                    ] = header.pop(name)
                case 4:
                    header["__metadata__"] = {"a" * random.randint(1, 3000): "b"}
                case 5:
                    del header[name]
                case _:
                    header[name + "2"] = entry
        return header

    def _bytes(self, payload: bytes) -> bytes:
        """Some bytes flipped, cut, repeated or joined to those of another frame."""
        random, data = self.random, bytearray(payload)
        match random.randrange(6):
            case 0:
                for _ in range(random.randint(1, 8)):
                    data[random.randrange(len(data))] = random.randrange(256)
            case 1:
                del data[random.randrange(len(data)) :]
            case 2:
                first, last = sorted(random.choices(range(len(data)), k=2))
                del data[first:last]
            case 3:
                data *= random.choice((2, 3, 40))
            case 4:
                data[random.randrange(len(data)) :] = random.choice(self.frames).payload
            case _:
                data = bytearray(random.randbytes(random.choice((1, 4, 100, 5000))))
        return bytes(data)

    def _text(self, payload: bytes) -> bytes:
        """Valid JSON or nearly so, of forms that parsers stumble over."""
        random, text = self.random, payload.decode()
        deep = random.choice((100, 5_000, 60_000))
        tricks: tuple[Callable[[], str], ...] = (
            lambda: text[:-1] + ', "x": ' + "[" * deep,
            lambda: text[:-1] + ', "x": ' + "[" * deep + "]" * deep + "}",
            lambda: text[:-1] + ', "x": ' + '{"a":' * deep + "0" + "}" * deep + "}",
            lambda: text[:-1] + ', "x": "' + "y" * random.choice((2000, 102_000, 110_000)) + '"}',
            lambda: text[:-1] + ", " + text[1:],  # every key twice
            lambda: f"[{text}]",
            text.upper,
            lambda: "\ufeff" + text,
            lambda: random.choice(RAW),
        )
        return random.choice(tricks)().encode()

    def _values(self, payload: bytes) -> bytes:
        """Some values, anywhere inside, replaced, removed or added."""
        message, raw = json.loads(payload), ""
        for _ in range(self.random.randint(1, 3)):
            holder, key = self._place(message)
            match self.random.randrange(8):
                case 0:
                    del holder[key]
                case 1 if isinstance(holder, dict):
                    holder[self.random.choice(TEXTS)] = holder[key]
                case 2:
                    holder[key], raw = _MARK, self.random.choice(RAW)
                case _:
                    holder[key] = self._wrong()
            if not message:
                break
        return json.dumps(message).replace(json.dumps(_MARK), raw).encode()

    def _place(self, value: Any) -> tuple[Any, Any]:
        while True:
            key = (
                self.random.choice(sorted(value))
                if isinstance(value, dict)
                else self.random.randrange(len(value))
            )
            inner = value[key]
            if not isinstance(inner, dict | list) or not inner or self.random.random() < 0.3:
                return value, key
            value = inner

    def _wrong(self) -> Any:
        random = self.random
        kinds = (
            None,
            True,
            [],
            {},
            [[]],
            0,
            0.5,
            -1e308,
            5e-324,
            random.choice(HUGE),
            random.choice(TEXTS),
        )
        types = [json.loads(frame.payload)["type"] for frame in random.choices(self._messages, k=3)]
        wide = (
            ["a"] * random.choice((1, 2000)),
            {str(n): n for n in range(random.choice((1, 3000)))},
        )
        long = "z" * random.choice((70, 3000, 102_000))
        return random.choice((*kinds, *types, *wide, long, random.getrandbits(40)))
