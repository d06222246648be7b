"""Two processes with one MQTT client id: what gives them away, and what does not."""

from typing import Any, cast

import pytest

from broker_config.mqtt.client import TAKEN_OVER, Connected, Disconnected
from broker_config.mqtt.collision import CollisionDetector
from broker_config.protocol.errors import EdgeNodeError

CLIENT = cast(Any, None)
UP, LOST = Connected(CLIENT), Disconnected(CLIENT, "connection lost")


class Connections:
    """Connections of given lengths, one after the other, as a detector observes them."""

    def __init__(self, **options: str):
        self._now = 1000.0
        self._detector = CollisionDetector("press", clock=lambda: self._now, **options)

    def last(self, *seconds: float, end: Disconnected = LOST) -> None:
        for each in seconds:
            self._now += 60.0
            self._detector.observe(UP)
            self._now += each
            self._detector.observe(end)


def test_a_broker_that_names_the_takeover_is_believed_at_once() -> None:
    with pytest.raises(EdgeNodeError, match="another process has connected as press"):
        Connections().last(3600.0, end=Disconnected(CLIENT, TAKEN_OVER))


def test_connections_that_break_again_and_again_just_made_are_a_collision() -> None:
    connections = Connections()
    connections.last(0.5, 2.9, 1.0)
    with pytest.raises(EdgeNodeError, match="another process has connected as press"):
        connections.last(0.1)


def test_one_longer_connection_between_short_ones_is_a_bad_network() -> None:
    connections = Connections()
    for _ in range(10):
        connections.last(0.5, 0.5, 0.5, 3.0)


def test_the_remedy_is_what_the_client_can_do() -> None:
    with pytest.raises(EdgeNodeError) as caught:
        Connections(remedy="choose another --name").last(1.0, end=Disconnected(CLIENT, TAKEN_OVER))
    assert caught.value.remedy == "choose another --name"
    with pytest.raises(EdgeNodeError) as caught:
        Connections().last(1.0, end=Disconnected(CLIENT, TAKEN_OVER))
    assert caught.value.remedy == "stop one of them"
