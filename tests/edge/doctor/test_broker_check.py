"""What passes through a broker, and what it keeps for whoever is away: each fault is found,
with the remedy.
"""

import secrets
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.handshake import MQTT5, MQTT311
from edge.doctor import broker_check, connection_check
from tests.support.doctor_checks import configured, tried
from tests.support.manual_clock import Clock
from tests.support.proxy import Proxy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "version", "control", "chunk", "advice"),
    [
        # it tells, so chunks are cut smaller
        ("max_packet_size 131072", MQTT5, "passes", "130,048 passes", ""),
        ("max_packet_size 65536", MQTT5, "is dropped", "64,512 passes", "max_packet_size"),
        (
            "message_size_limit 150000",
            MQTT5,
            "passes",
            "262,144 ends the connection",
            "message_size_limit 0",
        ),
        (
            "message_size_limit 20000",
            MQTT311,
            "is dropped",
            "262,144 is dropped",
            "message_size_limit 0",
        ),
    ],
)
def test_a_limit_of_messages_is_found_whether_it_is_told_or_not(
    limit: str, version: MQTTProtocolVersion, control: str, chunk: str, advice: str, tmp_path: Path
) -> None:
    with (
        configured(tmp_path, limit) as port,
        tried(f"mqtt://127.0.0.1:{port}", version=version) as context,
    ):
        found = broker_check.packets(context)
    assert f"a message of 102,400 bytes {control}, a chunk of {chunk}" in found.found
    assert found.outcome == ("failure" if advice else "ok")
    assert advice in found.remedy


def test_a_broker_that_keeps_few_messages_for_whoever_is_away(tmp_path: Path) -> None:
    few = secrets.randbelow(50) + 30  # mosquitto counts those that are under way apart
    with (
        configured(tmp_path, f"max_queued_messages {few}") as port,
        tried(f"mqtt://127.0.0.1:{port}") as context,
    ):
        found = broker_check.queue(context)
    assert found.outcome == "warning"
    assert few <= found.figures["kept"] <= few + 20
    assert "the oldest" in found.found
    assert "max_queued_messages 1000" in found.remedy


def test_a_broker_without_qos_1_does_not_do(tmp_path: Path) -> None:
    with configured(tmp_path, "max_qos 0") as port, tried(f"mqtt://127.0.0.1:{port}") as context:
        found = connection_check.version(context)
    assert found.outcome == "failure"
    assert "without QoS 1" in found.found


def test_a_broker_that_retains_nothing(tmp_path: Path) -> None:
    with (
        configured(tmp_path, "retain_available false") as port,
        tried(f"mqtt://127.0.0.1:{port}") as context,
    ):
        found = broker_check.retained(context)
    assert (found.outcome, found.remedy) == (
        "failure",
        "have the broker retain messages (mosquitto: retain_available true)",
    )


class Trips:
    """A connection on which a message takes 2 ms,
    and one right after another so many seconds, by a clock at zero.
    """

    def __init__(self, second: float):
        self._seconds = {1: 0.002, 2: second}
        self._sent = 0

    def subscribe(self, topic: str) -> None:
        """Whatever it is."""

    def send(self, topic: str, payload: bytes, qos: int) -> None:
        self._sent += 1

    def wait_for(self, met: object) -> SimpleNamespace:
        return SimpleNamespace(at=self._seconds[self._sent])

    def clear(self) -> None:
        self._sent = 0


@pytest.mark.parametrize(("second", "outcome"), [(0.042, "warning"), (0.003, "ok"), (0.2, "ok")])
def test_a_broker_that_holds_small_messages_back(
    second: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_check, "time", SimpleNamespace(perf_counter=Clock()))
    context: Any = SimpleNamespace(listening=lambda _: nullcontext(Trips(second)), topic="")
    found = broker_check.latency(context)
    assert found.outcome == outcome
    assert ("set_tcp_nodelay true" in found.remedy) == (outcome == "warning")


def test_a_slow_way_is_told_from_a_limit(mosquitto: EmbeddedBroker) -> None:
    with Proxy(mosquitto.port, rate=20_000) as proxy, tried(proxy.url, timeout=2) as context:
        found = broker_check.packets(context)
    assert (found.outcome, found.remedy) == (
        "unknown",
        "the connection is slow: try again with a longer --timeout",
    )
