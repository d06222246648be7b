"""Outcomes to an MQTT broker, one JSON message each: none lost, none twice, in order."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from edge.sinks.append_file import Ours
from edge.sinks.sink import Item, Refused, SinkDown, wire

if TYPE_CHECKING:
    from edge.sinks import homeassistant
    from edge.sinks.mqtt_connection import Connection  # loads paho: only a line with a broker needs it


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="mqtt"):
    """`[[sinks]] kind = "mqtt"`: one JSON message each."""

    url: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class Broker(Struct, frozen=True):
    """Where a sink publishes, and as whom: the same after a kill, so that the broker ends what is left of before."""

    endpoint: Endpoint
    line: str
    client_id: str

    @property
    def target(self) -> str:
        """Its address, without the user: who changes that means the same broker."""
        return str(replace(self.endpoint, username=None))


def broker(settings: "Settings | homeassistant.Settings", line: str, spool_id: str) -> Broker:
    """The broker that they name; UsageError when they do not go together."""
    ca, cert, key = (Path(each) if each else None for each in (settings.ca, settings.cert, settings.key))
    endpoint = Endpoint.parse(settings.url, ca=ca, cert=cert, key=key)
    if endpoint.tls:
        endpoint.tls_context()  # unusable files are found now
    return Broker(endpoint, line, f"edge-node-{line}-{spool_id}-{settings.__struct_config__.tag}")


class _Last(Struct):
    seq: int = 0
    id: str = ""


class Mqtt:
    """Publishes to `topics.verdicts(line)`, QoS 1, each outcome retained.

    So the broker itself remembers which it has accepted last, and after a lost connection or a kill we go on with the
    next. One that loses its retained messages gets those again that it had not acknowledged, at most 20. A message that
    it refuses while it takes later ones is left out; one that it refuses alone may be taken later.
    """

    def __init__(self, broker: Broker, ours: Ours) -> None:
        self._broker = broker
        self._topic = topics.verdicts(broker.line)
        self._ours = ours
        self._connection: Connection | None = None
        self._accepted = 0  # the last outcome that the broker has
        self._refused: dict[int, str] = {}  # those that it has refused, and why
        self.name = f"mqtt:{broker.target}"

    def deliver(self, items: Sequence[Item]) -> None:
        """Publish what the broker has not accepted yet, and wait for its acknowledgements."""
        connection = self._connected()
        fresh = [item for item in items if item.seq > self._accepted]
        payloads = [wire(item) for item in fresh]
        fit = next((n for n, each in enumerate(payloads) if not connection.fits(self._topic, each)), len(payloads))
        answers = connection.publish(self._topic, payloads[:fit])
        self._learn(items, {item.seq: answer for item, answer in zip(fresh, answers, strict=False)})
        for taken, item in enumerate(items):
            if item.seq > self._accepted:
                if connection.lost or item.seq in self._refused:
                    raise SinkDown(connection.lost or self._refused[item.seq], taken)
                raise Refused(f"{len(payloads[fit])} bytes are more than the broker takes", taken)
            if item.seq in self._refused:
                raise Refused(self._refused[item.seq], taken)

    def _learn(self, items: Sequence[Item], answers: dict[int, str]) -> None:
        self._accepted = max((seq for seq, why in answers.items() if not why), default=self._accepted)
        known = self._refused | answers
        self._refused = {item.seq: known[item.seq] for item in items if known.get(item.seq)}

    def close(self) -> None:
        """Disconnect."""
        if self._connection:
            self._connection.close()

    def _connected(self) -> "Connection":
        from edge.sinks.mqtt_connection import Connection  # noqa: PLC0415

        if self._connection and not self._connection.lost:
            return self._connection
        if self._connection:
            self._connection.close()
        self._connection = Connection(self._broker.endpoint, self._broker.client_id)
        last = _last(self._connection.retained(self._topic))
        if self._connection.lost:
            raise SinkDown(self._connection.lost)
        self._accepted = max(self._accepted, last.seq if self._ours(last.seq, last.id) else 0)
        return self._connection


def _last(payload: bytes | None) -> _Last:
    try:
        return msgspec.json.decode(payload or b"{}", type=_Last)
    except msgspec.DecodeError:  # not ours
        return _Last()
