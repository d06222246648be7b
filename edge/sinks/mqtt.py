"""Outcomes to an MQTT broker, one JSON message each: in order, none lost, none twice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from edge.config.broker_settings import BrokerSettings
from edge.config.instance import Instance
from edge.sinks.sink import IsOurs, Item, Origin, Refused, SinkDown, to_json

if TYPE_CHECKING:
    # loads paho: only a line with a broker needs it
    from edge.sinks.mqtt_connection import Connection


class Settings(BrokerSettings, frozen=True, kw_only=True, tag_field="kind", tag="mqtt"):
    """`[[sinks]] kind = "mqtt"`: one JSON message for each outcome."""

    def open_sink(self, instance: Instance, origin: Origin) -> "Mqtt":
        """Open the sink."""
        return Mqtt(broker(self, instance.line, origin.id), origin.contains)


class Broker(Struct, frozen=True):
    """A broker, and a client id that outlives a kill,
    so that the broker ends a connection left over from before.
    """

    endpoint: Endpoint
    line: str
    client_id: str

    @property
    def target(self) -> str:
        """Its address without the user: with another user it is the same broker."""
        return str(replace(self.endpoint, username=None))


def broker(settings: BrokerSettings, line: str, outbox_id: str) -> Broker:
    """The broker of a sink's settings; UsageError when they cannot be used."""
    tag = settings.__struct_config__.tag
    return Broker(settings.endpoint(), line, f"edge-node-{line}-{outbox_id}-{tag}")


class _Last(Struct):
    seq: int = 0
    id: str = ""


class Mqtt:
    """Publishes to `topics.verdicts(line)`, QoS 1, each outcome retained.

    So the broker itself tells which one it has accepted last, and after a lost connection or a kill
    we go on with the next. A broker that loses its retained messages gets again what it had not
    acknowledged, 20 at most. A message that it refuses while it accepts later ones is skipped; one
    that it refuses alone is tried again.
    """

    def __init__(self, broker: Broker, is_ours: IsOurs) -> None:
        self._broker = broker
        self._topic = topics.verdicts(broker.line)
        self._is_ours = is_ours
        self._connection: Connection | None = None
        self._accepted = 0  # the last outcome that the broker has
        self._refused: dict[int, str] = {}  # those that it has refused, and why
        self.name = f"mqtt:{broker.target}"

    def deliver(self, items: Sequence[Item]) -> None:
        """Publish what the broker has not accepted yet, and wait for its acknowledgements."""
        connection = self._connect()
        fresh = [item for item in items if item.seq > self._accepted]
        payloads = [to_json(item) for item in fresh]
        fit = next(
            (n for n, each in enumerate(payloads) if not connection.fits(self._topic, each)),
            len(payloads),
        )
        answers = connection.publish(self._topic, payloads[:fit])
        self._record(
            items, {item.seq: answer for item, answer in zip(fresh, answers, strict=False)}
        )
        for index, item in enumerate(items):
            if item.seq > self._accepted:
                if connection.lost or item.seq in self._refused:
                    raise SinkDown(connection.lost or self._refused[item.seq], index)
                raise Refused(f"{len(payloads[fit])} bytes are more than the broker takes", index)
            if item.seq in self._refused:
                raise Refused(self._refused[item.seq], index)

    def _record(self, items: Sequence[Item], answers: dict[int, str]) -> None:
        """Note what the broker has accepted and refused;
        an answer is empty or the reason of a refusal.
        """
        self._accepted = max(
            (seq for seq, why in answers.items() if not why), default=self._accepted
        )
        known = self._refused | answers
        self._refused = {item.seq: known[item.seq] for item in items if known.get(item.seq)}

    def close(self) -> None:
        """Disconnect."""
        if self._connection:
            self._connection.close()

    def _connect(self) -> "Connection":
        from edge.sinks.mqtt_connection import Connection  # noqa: PLC0415

        if self._connection and not self._connection.lost:
            return self._connection
        if self._connection:
            self._connection.close()
        self._connection = Connection(self._broker.endpoint, self._broker.client_id)
        last = _parse_last(self._connection.read_retained(self._topic))
        if self._connection.lost:
            raise SinkDown(self._connection.lost)
        seq = last.seq if self._is_ours(last.seq, last.id) else 0
        self._accepted = max(self._accepted, seq)
        return self._connection


def _parse_last(payload: bytes | None) -> _Last:
    try:
        return msgspec.json.decode(payload or b"{}", type=_Last)
    except msgspec.DecodeError:  # not ours
        return _Last()
