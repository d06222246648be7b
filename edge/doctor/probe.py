"""Parts that all checks share: their context, their result,
and a connection that acts only when told to.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec
from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from broker_config.mqtt.client import LARGEST_PACKET
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT5, MQTT311, PahoClient, handshake, refused_error
from broker_config.protocol import topics
from broker_config.protocol.codec import encoded_size
from broker_config.protocol.errors import BrokerError
from broker_config.protocol.messages import CommonSpec, Spec
from broker_config.protocol.round_contents import broadcast_tensors
from broker_config.transfer.blob_transfer import CHUNK

Outcome = Literal["ok", "warning", "failure", "unknown"]
SESSION = 120  # seconds: if we are killed, an MQTT 5 broker drops the session after this time


class Result(msgspec.Struct, frozen=True):
    """What a check found, and the remedy if it is a problem.

    `figures` are for machines, with the unit in the name.
    """

    outcome: Outcome
    found: str
    remedy: str = ""
    figures: Mapping[str, float] = {}
    name: str = ""  # of the check; its runner fills it in


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

    Messages are acknowledged at once, unless `holds`. Calls wait for the broker `timeout` seconds
    at most and raise LostError if the connection ends.
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
        self._endpoint = endpoint
        self._timeout = timeout
        self._keepalive = keepalive
        self._version = version
        self._session = session
        self._holds = holds
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
            # not retained: it may be published after we have tidied up
            client.will_set(*will, qos=1)
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
        return [
            topic
            for topic, reason in zip(topics, self._granted[mid], strict=True)
            if reason.is_failure
        ]

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
        """Return the first message for which `is_meant` holds, as soon as it arrives;
        None after the timeout.
        """

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
        """Disconnect, and break the connection if the broker does not react.

        A session stays on the broker.
        """
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
            chosen_timeout = self._timeout if timeout is None else timeout
            self._news.wait_for(lambda: condition() or self._lost, chosen_timeout)
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
        self.resumed = flags.session_present
        self.answer = properties
        self._client.answer = reason.getName()

    def _on_disconnect(
        self,
        client: paho.Client,
        _data: object,
        flags: paho.DisconnectFlags,
        reason: ReasonCode,
        _properties: object,
    ) -> None:
        client.disconnect()  # else paho would connect again
        with self._news:
            self._lost = (
                str(reason).lower() if flags.is_disconnect_packet_from_server else "without a word"
            )
            self._news.notify_all()

    def _on_message(self, client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        if not self._holds:
            client.ack(message.mid, message.qos)
        with self._news:
            self._received.append(
                ReceivedMessage(
                    message.topic,
                    bytes(message.payload),
                    message.retain,
                    message.dup,
                    time.perf_counter(),
                )
            )
            self._news.notify_all()

    def _on_publish(
        self, _client: paho.Client, _data: object, mid: int, reason: ReasonCode, _: object
    ) -> None:
        with self._news:
            self._acknowledged[mid] = reason
            self._news.notify_all()

    def _on_subscribe(
        self, _client: paho.Client, _data: object, mid: int, reasons: list[ReasonCode], _: object
    ) -> None:
        with self._news:
            self._granted[mid] = reasons
            self._news.notify_all()


@dataclass
class CheckContext:
    """Our name, the broker, and what the checks have found out for those that follow.

    `name` is the node that we act for, or `coordinator`; `timeout` (seconds) applies to each
    answer. Leaving the context ends our sessions and clears what the broker retains for us.
    """

    endpoint: Endpoint
    name: str
    state: Path
    timeout: float
    version: MQTTProtocolVersion = MQTT311
    echoes: bool = False  # whether what we publish on `topic` comes back to us
    chunk: int = CHUNK  # bytes of the largest chunk that passes
    round_trip: float = 0.0  # seconds
    specs: list[Spec] = field(default_factory=list)  # of the federations on this broker
    # of the federations of further kinds on this broker
    other_specs: list[CommonSpec] = field(default_factory=list)
    _token: str = field(default_factory=lambda: secrets.token_hex(8))  # makes our client ids unique
    _sessions: set[str] = field(default_factory=set)
    _retains: bool = False

    federation = topics.TRIAL

    @property
    def topic(self) -> str:
        """The topic that `name` may both write and read, retained messages included:
        its presence.
        """
        return topics.presence(self.federation, self.name)

    @property
    def speaks_5(self) -> bool:
        """Whether the connection uses MQTT 5, in which a broker gives reasons."""
        return self.version == MQTT5

    @property
    def model_bytes(self) -> int:
        """Size in bytes of the largest model of the federations on this broker;
        0 if none is known.
        """
        return max(
            (encoded_size(broadcast_tensors(spec, spec.rounds + 1)) for spec in self.specs),
            default=0,
        )

    def connection(
        self, part: str, *, endpoint: Endpoint | None = None, **options: Any
    ) -> ProbeConnection:
        """Return a connection for a `part` of the checks, to be opened;
        `options` are those of ProbeConnection.
        """
        client_id = f"edge-node/{self.federation}/{self.name}/{self._token}/{part}"
        if options.get("session"):
            self._sessions.add(part)
        return ProbeConnection(
            endpoint or self.endpoint, client_id, self.version, self.timeout, **options
        )

    @contextmanager
    def listening(self, part: str, **options: Any) -> Iterator[ProbeConnection]:
        """Open a connection as `connection` makes it, subscribed to our topic;
        close it afterwards.
        """
        with self.connection(part, **options) as connection:
            connection.subscribe(self.topic)
            yield connection

    def retain(self, connection: ProbeConnection, payload: bytes) -> str:
        """Have the broker retain `payload` on our topic;
        return "" or its reason for not doing so.
        """
        self._retains = True
        return connection.publish(self.topic, payload, retain=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # the broker is gone, or drops our sessions by itself
        with suppress(BrokerError, LostError):
            for part in self._sessions:
                self.connection(part).open().close()
            if self._retains:
                with self.connection("end") as connection:
                    connection.publish(self.topic, b"", retain=True)
