"""Verdicts over MQTT: none lost, none twice, in order, whoever is killed.

Real brokers, real kills.
"""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import paho.mqtt.client as paho
import pytest
from paho.mqtt import publish

from broker_config.mqtt.client import Endpoint, read_retained
from broker_config.protocol import topics
from edge.config.instance import Instance
from edge.daemon.line_settings import parse
from edge.outbox import delivery
from edge.outbox.limits import Limits
from edge.outbox.outbox import open_outbox
from edge.sinks.mqtt_connection import IN_FLIGHT
from tests.support.mosquitto import Mosquitto
from tests.support.numbered_outcomes import OutcomeProcess, numbers, verdict
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

TOPIC = topics.verdicts("line-1")
PUBLISH = 3  # the packet type


class Subscriber:
    """Another program's client, with a session that the broker keeps;
    `messages` is all that came, in order.
    """

    def __init__(self, url: str) -> None:
        self.messages: list[Any] = []
        self._url, self._others = url, set[bytes]()
        self.subscribed = threading.Event()
        self._news = threading.Condition()
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, "watcher", clean_session=False)
        self._client.on_message = self._on_message
        self._client.on_connect = lambda client, *_: client.subscribe(TOPIC, qos=1)
        self._client.on_subscribe = lambda *_: self.subscribed.set()
        self._client.reconnect_delay_set(1, 1)
        broker = httpx.URL(url)
        self._client.connect(broker.host, broker.port)
        self._client.loop_start()
        assert self.subscribed.wait(60)

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        with self._news:
            try:
                self.messages.append(json.loads(message.payload))
            except ValueError:
                self._others.add(message.payload)
            self._news.notify_all()

    def until(self, number: int) -> list[dict[str, Any]]:
        """What has come when the broker has handed on an outcome of this number or a later one."""
        with self._news:
            assert self._news.wait_for(
                lambda: any(int(each["image"]) >= number for each in self.messages[-1:]), 60
            )
        return list(self.messages)

    def all_until(self, number: int) -> list[dict[str, Any]]:
        """As `until`, and what the broker has taken since."""
        self.until(number)
        self.catch_up()
        return list(self.messages)

    def catch_up(self) -> None:
        """Wait until the broker has handed on all that it has taken,
        which a last message shows: the order is kept.
        """
        broker = httpx.URL(self._url)
        for number in range(2):  # the first one makes it read what has reached its socket
            last = f"last {number} {time.monotonic_ns()}".encode()
            publish.single(TOPIC, last, qos=1, hostname=broker.host, port=broker.port)
            with self._news:
                assert self._news.wait_for(lambda last=last: last in self._others, 60)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def once(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a receiver keeps that drops what it has seen: each number it has not had yet."""
    return list({each["seq"]: each for each in messages}.values())


@pytest.fixture
def lasting(tmp_path: Path) -> Iterator[Mosquitto]:
    running = Mosquitto(tmp_path / "broker", persistence=True)
    running.start()
    yield running
    running.kill()


@pytest.mark.slow
def test_a_daemon_that_is_killed_again_and_again_loses_nothing_and_says_nothing_twice(
    lasting, tmp_path
):
    watcher = Subscriber(lasting.url)
    sink = {"kind": "mqtt", "url": lasting.url}
    put: list[int] = []
    for start in range(3):
        process = OutcomeProcess(
            [sink], tmp_path / "state", first=2000 * start, count=2000, pause=0.001
        )
        watcher.until(2000 * start + 300 * start + 50)  # the rest is under way
        put += process.kill()
    assert len(watcher.messages) < 6000
    last = OutcomeProcess([sink], tmp_path / "state", first=6000, count=10).until()
    found = watcher.all_until(6009)
    last.end()
    watcher.close()
    received = numbers(found)
    assert received == sorted(set(received))
    assert set(put) <= set(received)


@pytest.mark.slow
def test_a_connection_that_breaks_again_and_again_loses_nothing_and_says_nothing_twice(
    lasting, tmp_path
):
    watcher = Subscriber(lasting.url)
    with Proxy(lasting.port) as proxy:
        sink = {"kind": "mqtt", "url": proxy.url}
        # three seconds and more
        process = OutcomeProcess([sink], tmp_path / "state", count=3000, pause=0.001)
        for number in (100, 700, 1300, 1900):
            watcher.until(number)
            proxy.cut()
        assert numbers(watcher.all_until(2999)) == list(range(3000))
        log = process.end()
    watcher.close()
    assert log.count("takes no outcomes: connection lost") == log.count("takes outcomes again") > 0


@pytest.mark.slow
@pytest.mark.parametrize("persistence", [True, False])
def test_a_broker_that_is_killed_and_comes_back_takes_up_where_it_was(persistence, tmp_path):
    broker = Mosquitto(tmp_path / "broker", persistence=persistence)
    broker.start()
    watcher = Subscriber(broker.url)
    process = OutcomeProcess(
        [{"kind": "mqtt", "url": broker.url}], tmp_path / "state", count=2000, pause=0.001
    )
    watcher.until(700)
    # what a broker has taken and not handed on dies with it
    process.process.send_signal(signal.SIGSTOP)
    watcher.catch_up()
    if persistence:
        # or it would hand on again what it has forgotten to have handed on
        broker.wait_until_saved()
    watcher.subscribed.clear()
    broker.kill()
    broker.start()
    assert watcher.subscribed.wait(60)
    process.process.send_signal(signal.SIGCONT)
    process.until()
    found = watcher.all_until(1999)
    process.end()
    watcher.close()
    broker.kill()
    assert numbers(once(found)) == list(range(2000))
    assert len(found) - 2000 <= IN_FLIGHT


@pytest.mark.slow
def test_a_broker_that_ends_in_order_and_a_daemon_that_is_killed_meanwhile_lose_nothing(
    lasting, tmp_path
):
    watcher = Subscriber(lasting.url)
    sink = {"kind": "mqtt", "url": lasting.url}
    process = OutcomeProcess([sink], tmp_path / "state", count=5000, pause=0.001).until(500)
    lasting.end()
    put = process.until(300).kill()
    again = OutcomeProcess([sink], tmp_path / "state", first=5000, count=500).until()
    lasting.start()
    received = numbers(once(watcher.all_until(5499)))
    again.end()
    watcher.close()
    assert set(put) | set(range(5000, 5500)) <= set(received)
    assert received == sorted(received)


class Refusing(Proxy):
    """Speaks as a broker of MQTT 5 that refuses the verdicts on these images: quota exceeded."""

    refused: frozenset[int] = frozenset()
    relenting = False  # from the next attempt on, which begins with the first image: never amid one

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError, EOFError), source.makefile("rb") as stream:
            while packet := read_packet(stream):
                if self.relenting and b'"image":"0"' in packet:
                    self.refused = frozenset()
                if packet[0] >> 4 == PUBLISH and any(
                    b'"image":"%d"' % number in packet for number in self.refused
                ):
                    at = packet.index(TOPIC.encode()) + len(TOPIC)
                    source.sendall(b"\x40\x03" + packet[at : at + 2] + b"\x97")
                else:
                    sink.sendall(packet)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def read_packet(stream: Any) -> bytes:
    """An MQTT packet, or nothing at the end."""
    packet, length, shift = stream.read(1), 0, 0
    while packet:
        packet += stream.read(1)
        length |= (packet[-1] & 127) << shift
        shift += 7
        if packet[-1] < 128:
            break
    return packet + stream.read(length)


@pytest.mark.parametrize("refused", [{3}, {0, 4, 9}, set(range(40))])
def test_what_a_broker_refuses_while_it_takes_later_ones_is_told_and_counted(
    refused, lasting, tmp_path, caplog
):
    watcher = Subscriber(lasting.url)
    with Refusing(lasting.port) as proxy, open_outbox(tmp_path / "spool", Limits()) as outbox:
        proxy.refused = frozenset(refused)
        wanted = parse(
            {"sinks": [{"kind": "mqtt", "url": proxy.url}]}, tmp_path / "line.toml"
        ).sinks[0]
        mqtt = wanted.open_sink(Instance("line-1", tmp_path), outbox)
        outbox.set_sinks([mqtt.name])
        for number in range(41):
            outbox.put(verdict(number))
        bringing = delivery.Delivery(outbox, mqtt, delivery.Pauses(first=0.01))
        try:
            if len(refused) == 40:  # all that are under way: they wait
                wait_until(lambda: "Quota exceeded" in caplog.text)
                assert bringing.refused == 0
                proxy.relenting, refused = True, frozenset()
            found = watcher.all_until(40)
        finally:
            delivery.stop([bringing])
        assert numbers_of(found) == [number for number in range(41) if number not in refused]
        assert caplog.text.count("refuses the outcome") == bringing.refused == len(refused)
        assert outbox.pending(mqtt.name) == 0
    watcher.close()


def numbers_of(messages: list[dict[str, Any]]) -> list[int]:
    return [int(each["image"]) for each in messages]


def test_another_user_of_the_same_broker_is_the_same_sink(tmp_path):
    with open_outbox(tmp_path / "spool", Limits()) as outbox:
        names = set()
        for url in ("mqtt://broker", "mqtt://line:secret@broker:1883"):
            (wanted,) = parse(
                {"sinks": [{"kind": "mqtt", "url": url}]}, tmp_path / "line.toml"
            ).sinks
            names.add(wanted.open_sink(Instance("line-1", tmp_path), outbox).name)
    assert names == {"mqtt:mqtt://broker:1883"}


def test_the_broker_keeps_the_last_verdict_for_those_who_come_later(broker, tmp_path):
    OutcomeProcess(
        [{"kind": "mqtt", "url": broker.url}], tmp_path / "state", count=30
    ).until().end()
    kept = read_retained(Endpoint.parse(broker.url), [TOPIC], 5)
    assert json.loads(kept[TOPIC])["image"] == "29"


def test_what_somebody_else_has_published_there_holds_nothing_up(mosquitto, tmp_path):
    watcher = Subscriber(mosquitto.url)
    for foreign in (b"no JSON", b'{"seq":9999999999999999,"id":"another line"}'):
        publish.single(TOPIC, foreign, retain=True, hostname="127.0.0.1", port=mosquitto.port)
        OutcomeProcess(
            [{"kind": "mqtt", "url": mosquitto.url}], tmp_path / "state", count=3
        ).until().end()
    watcher.close()
    assert [each["image"] for each in watcher.messages if "image" in each] == ["0", "1", "2"] * 2
