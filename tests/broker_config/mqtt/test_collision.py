"""Two processes with one MQTT client id: how they find out, which of them goes on,
and what gives them away.
"""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt import client
from broker_config.mqtt.client import Claim, Connected, MqttClient, TakenOver, is_name_taken
from broker_config.mqtt.collision import TAKEN_OVER, CollisionDetector
from broker_config.mqtt.endpoint import Endpoint
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

TOPIC = "edge-node/v1/steel/nodes/press/presence"


class Process:
    """A process called `press`, which says that it is there whenever it has connected."""

    def __init__(self, url: str):
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.claim = Claim.draw(TOPIC)
        self.mqtt = MqttClient(
            Endpoint.parse(url), "press", inbox=self.inbox, persistent=True, claim=self.claim
        )
        self.connections, self.gave_way = 0, False
        self.mqtt.open()

    def look(self) -> None:
        while not self.inbox.empty():
            event = self.inbox.get()
            self.gave_way |= isinstance(event, TakenOver)
            if isinstance(event, Connected):
                self.connections += 1
                self.mqtt.publish_presence(online=True)

    @property
    def is_settled(self) -> bool:
        """Whether it is connected, or knows that another one is."""
        self.look()
        return self.gave_way or (
            self.connections > 0 and self.mqtt.is_connected and self.mqtt._claim_stands
        )


def settle(*processes: Process) -> None:
    wait_until(lambda: not [each for each in processes if not each.is_settled])  # all of them look


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def press(stack: ExitStack, url: str) -> Process:
    process = Process(url)
    stack.callback(process.mqtt.close)
    return process


def test_who_has_a_name_says_so_to_whoever_asks(broker: EmbeddedBroker, stack: ExitStack) -> None:
    owner, endpoint = press(stack, broker.url), Endpoint.parse(broker.url)
    settle(owner)
    assert is_name_taken(endpoint, Claim.draw(TOPIC))
    assert not is_name_taken(endpoint, Claim.draw(TOPIC.replace("press", "oven")))
    owner.mqtt.publish_presence(online=False)
    assert owner.mqtt.flush(60)
    owner.mqtt.close()
    assert not is_name_taken(endpoint, Claim.draw(TOPIC))


def test_a_name_is_free_whose_owner_only_seems_to_be_there(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its will was forgotten: a restored backup is let in, and so is a process that was killed."""
    monkeypatch.setattr(client, "ANSWER", 0.3)
    endpoint = Endpoint.parse(broker.url)
    with MqttClient(endpoint, "", inbox=queue.Queue(), persistent=False) as mqtt:
        mqtt.publish(TOPIC, Claim.draw(TOPIC).encode(), retain=True)
        assert mqtt.flush(60)
    assert not is_name_taken(endpoint, Claim.draw(TOPIC))


def test_of_two_that_have_started_at_once_one_gives_way_soon(
    mosquitto: EmbeddedBroker, stack: ExitStack
) -> None:
    """mosquitto 2.0.11 does not say that a connection was taken over."""
    both = [press(stack, mosquitto.url) for _ in range(2)]
    settle(*both)
    # the first one may have had no time to lose its connection
    while not any(each.gave_way for each in both):
        settle(*both)
    assert sorted(each.gave_way for each in both) == [False, True]
    assert sum(each.connections for each in both) <= 4
    (remaining,) = [each for each in both if not each.gave_way]
    settle(remaining)
    assert is_name_taken(Endpoint.parse(mosquitto.url), Claim.draw(TOPIC))


def test_who_was_away_connects_again_unless_another_has_come_meanwhile(
    mosquitto: EmbeddedBroker, stack: ExitStack
) -> None:
    with Proxy(mosquitto.port) as proxy:
        first = press(stack, proxy.url)
        settle(first)
        proxy.cut()
        while first.connections < 2:
            settle(first)
        assert not first.gave_way
        proxy.refuses = True
        proxy.cut()
        second = press(stack, mosquitto.url)
        settle(second)
        proxy.refuses = False
        while not first.gave_way:
            settle(first)
        settle(second)
        assert (second.connections, second.gave_way) == (1, False)


# Without a claim


class Connections:
    """Connections of given lengths, one after the other, as a detector observes them."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._detector = CollisionDetector(lambda: self._now)

    def last(self, *seconds: float, end: str = "connection lost") -> list[bool]:
        return [self._connect(each, end) for each in seconds]

    def _connect(self, seconds: float, end: str) -> bool:
        self._now += 60.0
        self._detector.begin()
        self._now += seconds
        return self._detector.end(end)


def test_a_broker_that_names_the_takeover_is_believed_at_once() -> None:
    assert Connections().last(3600.0, end=TAKEN_OVER) == [True]


def test_connections_that_break_again_and_again_just_made_are_a_collision() -> None:
    assert Connections().last(0.5, 2.9, 1.0, 0.1) == [False, False, False, True]


def test_one_longer_connection_between_short_ones_is_a_bad_network() -> None:
    connections = Connections()
    for _ in range(10):
        assert not any(connections.last(0.5, 0.5, 0.5, 3.0))
