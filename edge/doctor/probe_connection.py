"""MQTT connection for checks: it acknowledges, breaks and reconnects only when told to."""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from broker_config.mqtt.client import LARGEST_PACKET
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT5, PahoClient, handshake, refused_error


class LostError(Exception):
    """The broker, or something on the way to it, ended the connection; the text says how."""


class ReceivedMessage(NamedTuple):
    """A message, received `at` seconds of `time.perf_counter`."""

    topic: str
    payload: bytes
    retain: bool
    duplicate: bool
    at: float


class ProbeConnection:
    """A connection of `client_id`; the broker keeps its session for `session` seconds.

    Messages are acknowledged at once, unless `holds`. Calls wait for the broker `timeout` seconds at most and raise
    LostError if the connection ends.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        version: MQTTProtocolVersion,
        timeout: float,
        *,
        session: int = 0,
        will: tuple[str, bytes] | None = None,
        holds: bool = False,
        keepalive: int = 20,
    ):
        self.resumed = False  # whether the broker had a session of this client
        self.answer: Properties | None = None  # properties that the broker announced (MQTT 5)
        self._endpoint, self._timeout, self._keepalive = endpoint, timeout, keepalive
        self._version, self._session, self._holds = version, session, holds
        self._received: list[ReceivedMessage] = []
        self._acknowledged: dict[int, ReasonCode] = {}
        self._granted: dict[int, list[ReasonCode]] = {}
        self._lost = ""
        self._news = threading.Condition()
        self._client = client = PahoClient(endpoint, client_id, version, persistent=session > 0)
        client.suppress_exceptions = True
        client.manual_ack_set(True)
        client.username_pw_set(endpoint.username, endpoint.password)
        if will:
            client.will_set(*will, qos=1)  # not retained: it may be published after we have tidied up
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe

    def open(self) -> Self:
        """Connect; BrokerError says why that fails."""
        options: dict[str, Any] = {}
        if self._version == MQTT5:
            options["clean_start"] = not self._session
            options["properties"] = properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.MaximumPacketSize = LARGEST_PACKET
            properties.SessionExpiryInterval = self._session
        answer = handshake(self._client, self._endpoint, self._timeout, self._keepalive, **options)
        if answer != "Success":
            raise refused_error(self._endpoint, answer)
        self._client.loop_start()
        return self

    def offered(self, name: str) -> int | None:
        """Return the value of the MQTT 5 property `name` that the broker announced, or None."""
        value: int | None = getattr(self.answer, name, None)
        return value

    def subscribe(self, *topics: str) -> list[str]:
        """Ask for `topics` with QoS 1; return those that the broker refuses."""
        mid = self._client.subscribe([(topic, 1) for topic in topics])[1]
        if mid is None:
            raise LostError(self._lost)
        if not self._wait(lambda: mid in self._granted):
            return list(topics)
        return [topic for topic, reason in zip(topics, self._granted[mid], strict=True) if reason.is_failure]

    def send(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> int:
        """Send a message without waiting; return its number."""
        return self._client.publish(topic, payload, qos, retain).mid

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> str:
        """Send a message with QoS 1; return "" if the broker accepts it, else its reason."""
        mid = self.send(topic, payload, retain=retain)
        if not self._wait(lambda: mid in self._acknowledged):
            return "no answer"
        reason = self._acknowledged[mid]
        return str(reason) if reason.is_failure else ""

    def wait_for_acknowledgement(self, mid: int) -> bool:
        """Whether the broker acknowledges the message of this number."""
        return self._wait(lambda: mid in self._acknowledged)

    def wait_for(
        self, is_meant: Callable[[ReceivedMessage], bool], timeout: float | None = None
    ) -> ReceivedMessage | None:
        """Return the first message for which `is_meant` holds, as soon as it arrives; None after the timeout."""

        def first() -> ReceivedMessage | None:
            return next((each for each in self._received if is_meant(each)), None)

        return first() if self._wait(lambda: first() is not None, timeout) else None

    def wait_for_count(self, count: int, timeout: float) -> bool:
        """Whether `count` messages arrive within `timeout` seconds."""
        return self._wait(lambda: len(self._received) >= count, timeout)

    @property
    def received(self) -> list[ReceivedMessage]:
        """The messages received so far."""
        with self._news:
            return list(self._received)

    def clear(self) -> None:
        """Discard the messages received so far."""
        with self._news:
            self._received.clear()

    def abort(self) -> None:
        """Break the connection, as a power cut would: without a word to the broker."""
        sock = self._client.socket()
        if sock is not None:
            with socket.socket(fileno=os.dup(sock.fileno())) as raw:
                raw.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def close(self) -> None:
        """Disconnect, and break the connection if the broker does not react. A session stays on the broker."""
        self._client.disconnect()
        with self._news:
            self._news.wait_for(lambda: self._lost, self._timeout)
        self.abort()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        with self._news:
            self._news.wait_for(lambda: condition() or self._lost, self._timeout if timeout is None else timeout)
            if condition():
                return True
            if self._lost:
                raise LostError(self._lost)
            return False

    def _on_connect(
        self,
        _client: paho.Client,
        _data: object,
        flags: paho.ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self.resumed, self.answer = flags.session_present, properties
        self._client.answer = reason.getName()

    def _on_disconnect(
        self, client: paho.Client, _data: object, flags: paho.DisconnectFlags, reason: ReasonCode, _properties: object
    ) -> None:
        client.disconnect()  # else paho would connect again
        with self._news:
            self._lost = str(reason).lower() if flags.is_disconnect_packet_from_server else "without a word"
            self._news.notify_all()

    def _on_message(self, client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        if not self._holds:
            client.ack(message.mid, message.qos)
        with self._news:
            self._received.append(
                ReceivedMessage(message.topic, bytes(message.payload), message.retain, message.dup, time.perf_counter())
            )
            self._news.notify_all()

    def _on_publish(self, _client: paho.Client, _data: object, mid: int, reason: ReasonCode, _: object) -> None:
        with self._news:
            self._acknowledged[mid] = reason
            self._news.notify_all()

    def _on_subscribe(
        self, _client: paho.Client, _data: object, mid: int, reasons: list[ReasonCode], _: object
    ) -> None:
        with self._news:
            self._granted[mid] = reasons
            self._news.notify_all()
