"""The bad network of the chaos runs is as bad as it says, and whatever it does stays MQTT."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.client import Connected, Delivery, Disconnected, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from tests.support.unreliable_network import FAIR, FaultRates, UnreliableProxy

_MESSAGES = [bytes([number]) * 200 for number in range(30)]


@contextmanager
def listening(
    broker: EmbeddedBroker, weather: FaultRates
) -> "Iterator[tuple[MqttClient, queue.Queue[Any]]]":
    """A sender in fair weather; the inbox of a subscriber who meets `weather` once he is
    connected.
    """
    inbox: queue.Queue[Any] = queue.Queue()
    with (
        UnreliableProxy(broker.port, FAIR, seed=1) as storm,
        MqttClient(Endpoint.parse(storm.url), "receiver", inbox=inbox, persistent=True) as receiver,
        MqttClient(
            Endpoint.parse(broker.url), "sender", inbox=queue.Queue(), persistent=False
        ) as sender,
    ):
        receiver.subscribe("a")
        assert isinstance(inbox.get(timeout=60), Connected)
        while not receiver._subscribed.wait(0.1):
            pass
        storm.weather = weather
        yield sender, inbox


def received(inbox: "queue.Queue[Any]", count: int = 0) -> list[bytes]:
    """What came, up to `count` messages or until the last; all are acknowledged."""
    found: list[bytes] = []
    while len(found) < count or not count:
        event = inbox.get(timeout=60)
        if isinstance(event, Delivery):
            event.client.ack(event)
            if event.payload == b"last":
                break
            found.append(event.payload)
    return found


def send(sender: MqttClient, qos: int) -> None:
    for payload in _MESSAGES:
        sender.publish("a", payload, qos=qos)
    sender.flush(60)


@pytest.mark.parametrize("qos", [0, 1])
def test_fair_weather_changes_nothing(qos: int, mosquitto: EmbeddedBroker) -> None:
    with listening(mosquitto, FAIR) as (sender, inbox):
        send(sender, qos)
        sender.publish("a", b"last")
        assert received(inbox) == _MESSAGES


def test_what_is_dropped_is_qos_0_only(mosquitto: EmbeddedBroker) -> None:
    with listening(mosquitto, FaultRates(drop=1)) as (sender, inbox):
        send(sender, 0)
        send(sender, 1)
        sender.publish("a", b"last")
        assert received(inbox) == _MESSAGES


@pytest.mark.parametrize("qos", [0, 1])
def test_what_is_doubled_comes_twice(qos: int, mosquitto: EmbeddedBroker) -> None:
    with listening(mosquitto, FaultRates(double=1)) as (sender, inbox):
        send(sender, qos)
        sender.publish("a", b"last")
        assert received(inbox) == [each for each in _MESSAGES for _ in range(2)]


def test_what_is_held_back_is_overtaken(mosquitto: EmbeddedBroker) -> None:
    with listening(mosquitto, FaultRates(hold=0.5, longest=0.2)) as (sender, inbox):
        send(sender, 1)
        found = received(inbox, count=len(_MESSAGES))
        assert sorted(found) == _MESSAGES
        assert found != _MESSAGES


@pytest.mark.slow
def test_a_cut_may_be_in_the_middle_of_a_packet_and_qos_1_arrives_all_the_same(
    mosquitto: EmbeddedBroker,
) -> None:
    with listening(mosquitto, FaultRates(cut=0.04)) as (sender, inbox):
        send(sender, 1)
        sender.publish("a", b"last")
        found, cuts = set[bytes](), 0
        while b"last" not in found or len(found) <= len(_MESSAGES):
            event = inbox.get(timeout=60)
            cuts += isinstance(event, Disconnected)
            if isinstance(event, Delivery):
                event.client.ack(event)
                found.add(event.payload)
        assert cuts
        assert found == {*_MESSAGES, b"last"}
