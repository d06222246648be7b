"""A Sparkplug host application for tests: it reads the wire format by itself,
and holds nodes to the specification.

Nothing of `edge` is used here: field numbers and rules are those of Eclipse Sparkplug 3.0.0
(chapters 4 to 6).
"""

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import paho.mqtt.client as paho

from tests.support.waiting import PATIENCE

INT64, DOUBLE, BOOLEAN, STRING = 4, 10, 11, 12
SLOTS = {INT64: 11, DOUBLE: 13, BOOLEAN: 14, STRING: 15}  # datatype -> the field of its value
VALUES = range(10, 20)  # fields of which a metric has at most one
REBIRTH = "Node Control/Rebirth"


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: number, and an int or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        match key & 7:
            case 0:
                value, at = varint(data, at)
                yield key >> 3, value
            case 1:
                yield key >> 3, data[at : at + 8]
                at += 8
            case 2:
                size, at = varint(data, at)
                assert at + size <= len(data)
                yield key >> 3, data[at : at + size]
                at += size
            case other:
                raise AssertionError(f"wire type {other}")


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


class Metric(NamedTuple):
    name: str | None
    alias: int | None
    timestamp: int
    datatype: int | None
    historical: bool
    null: bool
    value: tuple[int, Any] | None  # its field, and what stands there


class Payload(NamedTuple):
    timestamp: int
    seq: int | None
    metrics: list[Metric]


def parse(data: bytes) -> Payload:
    """A payload; AssertionError when a field stands twice, or one that is needed is missing."""
    single: dict[int, int] = {}
    metrics = []
    for number, value in fields(data):
        if number == 2:
            metrics.append(parse_metric(value))
        else:
            assert number in (1, 3), f"field {number} of a payload"
            assert number not in single
            single[number] = value
    return Payload(single[1], single.get(3), metrics)


def parse_metric(data: bytes) -> Metric:
    found = list(fields(data))
    given = dict(found)
    assert len(given) == len(found), "a field stands twice"
    slots = [number for number in given if number in VALUES]
    assert len(slots) <= 1
    return Metric(
        given[1].decode() if 1 in given else None,
        given.get(2),
        given[3],
        given.get(4),
        bool(given.get(5, 0)),
        bool(given.get(7, 0)),
        (slots[0], given[slots[0]]) if slots else None,
    )


def read(metric: Metric, datatype: int) -> Any:
    """The value of a metric; AssertionError when it is not as its datatype wants it."""
    assert metric.null == (metric.value is None), "null and a value, or neither"
    if metric.value is None:
        return None
    number, raw = metric.value
    assert number == SLOTS[datatype], f"datatype {datatype} in field {number}"
    match datatype:
        case 4:
            return raw - (1 << 64) if raw >> 63 else raw
        case 10:
            return struct.unpack("<d", raw)[0]
        case 11:
            assert raw in (0, 1)
            return bool(raw)
    return raw.decode()


def command(name: str, value: bool) -> bytes:
    """The payload of an NCMD with one boolean metric, written by hand."""
    encoded = name.encode()
    metric = b"\x0a" + bytes([len(encoded)]) + encoded + b"\x20\x0b" + b"\x70" + bytes([value])
    return b"\x08" + b"\xd2\x85\xd8\xcc\x04" + b"\x12" + bytes([len(metric)]) + metric


def state(online: bool, timestamp: int) -> bytes:
    return json.dumps({"online": online, "timestamp": timestamp}).encode()


class Told(NamedTuple):
    """A DDATA as a host sees it."""

    values: dict[str, Any]
    historical: dict[str, bool]
    times: dict[str, int]
    sent: int


class Checker:
    """Follows one edge node and its device; AssertionError when a message breaks a rule."""

    def __init__(self, group: str, node: str, device: str) -> None:
        self.group, self.node, self.device = group, node, device
        self.kinds: list[str] = []
        self.births: list[int] = []  # bdSeq of each NBIRTH
        self.deaths: list[int] = []
        self.properties: dict[str, Any] = {}
        self.current: dict[str, Any] = {}  # of the device, as its birth has them
        self.told: list[Told] = []
        self._seq: int | None = None  # of the next message; None: nothing may come but a birth
        # node's and device's: alias -> name, datatype
        self._declared: dict[str, dict[int, tuple[str, int]]] = {}

    def take(self, topic: str, data: bytes, qos: int = 0, retain: bool = False) -> None:
        space, group, kind, node, *device = topic.split("/")
        assert (space, group, node) == ("spBv1.0", self.group, self.node)
        assert device == ([self.device] if kind[0] == "D" else [])
        assert not retain
        assert qos == (1 if kind == "NDEATH" else 0), kind
        payload = parse(data)
        getattr(self, f"_{kind.lower()}")(payload)
        self.kinds.append(kind)

    def _nbirth(self, payload: Payload) -> None:
        assert payload.seq == 0
        self._seq = 1
        self._declared = {}
        self.properties = self._born("N", payload)
        rebirth = next(each for each in payload.metrics if each.name == REBIRTH)
        assert (rebirth.alias, rebirth.datatype, rebirth.value) == (None, BOOLEAN, (14, 0))
        bdseq = next(each for each in payload.metrics if each.name == "bdSeq")
        assert bdseq.datatype == INT64
        if (
            self.births
            and (self.deaths or [None])[-1] != self.births[-1]
            and self.properties["bdSeq"] == self.births[-1]
        ):
            pass  # a rebirth
        elif self.births:
            assert self.properties["bdSeq"] == (self.births[-1] + 1) % 256
        self.births.append(self.properties["bdSeq"])

    def _dbirth(self, payload: Payload) -> None:
        self._number(payload)
        assert self.kinds[-1] == "NBIRTH"
        self.current = self._born("D", payload)

    def _born(self, whose: str, payload: Payload) -> dict[str, Any]:
        found, declared = {}, {}
        for metric in payload.metrics:
            assert metric.name
            assert metric.datatype in SLOTS
            assert not metric.historical
            assert metric.name not in found
            found[metric.name] = read(metric, metric.datatype)
            if metric.alias is not None:
                declared[metric.alias] = (metric.name, metric.datatype)
        names = [name.lower() for name in found]
        assert len(set(names)) == len(names)
        aliases = [*declared, *(alias for each in self._declared.values() for alias in each)]
        assert len(set(aliases)) == len(aliases)
        assert len(declared) == len(found) - (REBIRTH in found)
        self._declared[whose] = declared
        times = [each.timestamp for each in payload.metrics]
        assert times == sorted(times)
        return found

    def _ndata(self, payload: Payload) -> None:
        self.properties |= self._data("N", payload).values

    def _ddata(self, payload: Payload) -> None:
        self.told.append(self._data("D", payload))

    def _data(self, whose: str, payload: Payload) -> Told:
        self._number(payload)
        assert set(self._declared) == {"N", "D"}, "data before births"
        assert payload.metrics
        said = Told({}, {}, {}, payload.timestamp)
        for metric in payload.metrics:
            assert metric.name is None
            assert metric.datatype is None
            assert metric.alias is not None
            name, datatype = self._declared[whose][metric.alias]
            assert name not in said.values
            said.values[name] = read(metric, datatype)
            said.historical[name] = metric.historical
            said.times[name] = metric.timestamp
        live = [each.timestamp for each in payload.metrics if not each.historical]
        assert live == sorted(live)
        return said

    def _ddeath(self, payload: Payload) -> None:
        self._number(payload)
        assert self._declared.pop("D")

    def _ndeath(self, payload: Payload) -> None:
        assert payload.seq is None
        (metric,) = payload.metrics
        assert (metric.name, metric.datatype) == ("bdSeq", INT64)
        self.deaths.append(read(metric, INT64))
        if self.births:
            # the latter: it was never born
            assert self.deaths[-1] in (self.births[-1], (self.births[-1] + 1) % 256)
        if self.births and self.deaths[-1] == self.births[-1]:
            self._seq = None

    def _number(self, payload: Payload) -> None:
        assert self._seq is not None, "nothing may come before a birth"
        assert payload.seq == self._seq
        self._seq = (self._seq + 1) % 256


class Host:
    """A host application at a broker, which may be the primary one (`name`);
    it is online from `online` on.
    """

    def __init__(self, port: int, checker: Checker, name: str = "") -> None:
        self.checker = checker
        self.wrong: list[str] = []
        self._changed = threading.Condition()
        self._topic = f"spBv1.0/STATE/{name}"
        self._client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, f"host-{name}-{time.time_ns()}"
        )
        self._client.on_message = self._on_message
        self._client.on_connect = lambda client, *_: client.subscribe(
            f"spBv1.0/{checker.group}/#", 1
        )
        self._lost = threading.Event()
        self._client.on_disconnect = lambda *_: self._lost.set()
        subscribed = threading.Event()
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert subscribed.wait(60)

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        with self._changed:
            if "/NCMD/" not in message.topic:
                try:
                    self.checker.take(message.topic, message.payload, message.qos, message.retain)
                except Exception as error:
                    self.wrong.append(f"{message.topic} {message.payload.hex()}: {error!r}")
            self._changed.notify_all()

    def wait(self, condition: Callable[[Checker], object], timeout: float = PATIENCE) -> None:
        """Until it holds; every message until then was as it should be."""
        with self._changed:
            held = self._changed.wait_for(lambda: self.wrong or condition(self.checker), timeout)
            assert not self.wrong, self.wrong[0]
            assert held, f"{self.checker.kinds[-20:]} {self.checker.births} {self.checker.deaths}"

    def rebirth(self) -> None:
        self.say(f"spBv1.0/{self.checker.group}/NCMD/{self.checker.node}", command(REBIRTH, True))

    def online(self, online: bool, timestamp: int) -> None:
        self.say(self._topic, state(online, timestamp), qos=1, retain=True)

    def say(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
        self._client.publish(topic, payload, qos, retain).wait_for_publish(60)

    def gone(self) -> None:
        """Once everything has been read of a broker that is dead."""
        assert self._lost.wait(60)
        self.close()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
