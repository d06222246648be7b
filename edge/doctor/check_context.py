"""Context that all checks share: the broker, a federation used for nothing else, and what earlier checks found."""

import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from paho.mqtt.enums import MQTTProtocolVersion

from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT5, MQTT311
from broker_config.protocol import topics
from broker_config.protocol.codec import encoded_size
from broker_config.protocol.errors import BrokerError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import broadcast_tensors
from broker_config.protocol.vfl_messages import VflSpec
from broker_config.transfer.blob_transfer import CHUNK
from edge.doctor.probe_connection import LostError, ProbeConnection

SESSION = 120  # seconds: if we are killed, an MQTT 5 broker drops the session after this time


@dataclass
class CheckContext:
    """Our name, the broker, and what the checks have found out for those that follow.

    `name` is the node that we act for, or `coordinator`; `timeout` (seconds) applies to each answer. Leaving the
    context ends our sessions and clears what the broker retains for us.
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
    vfl_specs: list[VflSpec] = field(default_factory=list)  # of the vertical federations on this broker
    _token: str = field(default_factory=lambda: secrets.token_hex(8))  # makes our client ids unique
    _sessions: set[str] = field(default_factory=set)
    _retains: bool = False

    federation = topics.TRIAL

    @property
    def topic(self) -> str:
        """The topic that `name` may both write and read, retained messages included: its presence."""
        return topics.presence(self.federation, self.name)

    @property
    def speaks_5(self) -> bool:
        """Whether the connection uses MQTT 5, in which a broker gives reasons."""
        return self.version == MQTT5

    @property
    def model_bytes(self) -> int:
        """Size in bytes of the largest model of the federations on this broker; 0 if none is known."""
        return max((encoded_size(broadcast_tensors(spec, spec.rounds + 1)) for spec in self.specs), default=0)

    def connection(self, part: str, *, endpoint: Endpoint | None = None, **options: Any) -> ProbeConnection:
        """Return a connection for a `part` of the checks, to be opened; `options` are those of ProbeConnection."""
        client_id = f"edge-node/{self.federation}/{self.name}/{self._token}/{part}"
        if options.get("session"):
            self._sessions.add(part)
        return ProbeConnection(endpoint or self.endpoint, client_id, self.version, self.timeout, **options)

    def retain(self, connection: ProbeConnection, payload: bytes) -> str:
        """Have the broker retain `payload` on our topic; return "" or its reason for not doing so."""
        self._retains = True
        return connection.publish(self.topic, payload, retain=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokerError, LostError):  # the broker is gone, or drops our sessions by itself
            for part in self._sessions:
                self.connection(part).open().close()
            if self._retains:
                with self.connection("end") as connection:
                    connection.publish(self.topic, b"", retain=True)
