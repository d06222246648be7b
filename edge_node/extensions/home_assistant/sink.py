"""The line as a device in Home Assistant, by MQTT discovery.

https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from broker_config.protocol.topics import ROOT
from edge.config.broker_settings import BrokerSettings
from edge.config.instance import Instance
from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.sinks.mqtt import Broker, broker
from edge.sinks.sink import Item, Origin, SinkDown

if TYPE_CHECKING:
    from edge.sinks.mqtt_connection import Connection

# what Home Assistant expects by default
_ONLINE = b"online"
_OFFLINE = b"offline"


def topic(line: str) -> str:
    """Line daemon -> Home Assistant, retained: the root of its state and of its availability."""
    return f"{ROOT}/lines/{line}/homeassistant"


class Settings(BrokerSettings, frozen=True, kw_only=True, tag_field="kind", tag="homeassistant"):
    """`[[sinks]] kind = "homeassistant"`: the broker that Home Assistant uses."""

    prefix: str = "homeassistant"  # Home Assistant's discovery prefix

    def open_sink(self, instance: Instance, origin: Origin) -> "HomeAssistant":
        """Open the sink."""
        return HomeAssistant(broker(self, instance.line, origin.id), self.prefix)


class State(Struct):
    """What Home Assistant shows of a line; counted since the daemon's start."""

    label: str | None = None
    confidence: float | None = None  # per cent
    defect: str = "OFF"
    untaught: str = "OFF"  # whether the label is a class that this plant never taught
    # whether the latest frame could not be inspected, or needs a person to look at it
    problem: str = "OFF"
    # the latest failure or notice; Home Assistant takes up to 255 characters
    message: str | None = None
    parts: int = 0
    defects: int = 0
    failures: int = 0

    def after(self, outcome: Outcome) -> "State":
        """The state after one more outcome."""
        match outcome:
            case Verdict():
                return msgspec.structs.replace(
                    self,
                    label=outcome.label,
                    confidence=round(100 * outcome.confidence, 1),
                    defect=_on_off(outcome.defect),
                    untaught=_on_off(not outcome.taught),
                    problem=_on_off(bool(outcome.doubts)),
                    parts=self.parts + 1,
                    defects=self.defects + outcome.defect,
                )
            case Failure():
                return msgspec.structs.replace(
                    self, problem="ON", message=outcome.error[:255], failures=self.failures + 1
                )
            case Notice():
                return msgspec.structs.replace(self, message=outcome.text[:255])


class HomeAssistant:
    """Announces the line when it connects, then publishes its state;
    the will reports a line that is gone.

    Only the present counts there: of replayed outcomes only the last state is published.
    """

    def __init__(self, broker: Broker, prefix: str) -> None:
        self.name = f"homeassistant:{broker.target}"
        self._broker = broker
        self._prefix = prefix
        self._base = topic(broker.line)
        self._state = State()
        self._connection: Connection | None = None

    def deliver(self, items: Sequence[Item]) -> None:
        """Publish the state after each item."""
        connection = self._connect()
        states = []
        state = self._state
        for item in items:
            state = state.after(item.outcome)
            states.append(state)
        shown = [
            each
            for each, item in zip(states, items, strict=True)
            if not item.replayed or item is items[-1]
        ]
        _publish(connection, f"{self._base}/state", *map(msgspec.json.encode, shown))
        self._state = state

    def close(self) -> None:
        """Publish that the line is gone, and disconnect."""
        if self._connection and not self._connection.lost:
            self._connection.publish(f"{self._base}/availability", [_OFFLINE])
            self._connection.close()

    def _connect(self) -> "Connection":
        from edge.sinks.mqtt_connection import Connection  # noqa: PLC0415

        if self._connection and not self._connection.lost:
            return self._connection
        if self._connection:
            self._connection.close()
        self._connection = Connection(
            self._broker.endpoint,
            self._broker.client_id,
            will=(f"{self._base}/availability", _OFFLINE),
        )
        device = f"edge-node-{self._broker.line}".replace(".", "-")
        for topic, payload in (
            (
                f"{self._prefix}/device/{device}/config",
                msgspec.json.encode(discovery(device, self._broker.line)),
            ),
            (f"{self._base}/state", msgspec.json.encode(self._state)),
            (f"{self._base}/availability", _ONLINE),
        ):
            _publish(self._connection, topic, payload)
        return self._connection


def _publish(connection: "Connection", topic: str, *payloads: bytes) -> None:
    refusals = list(filter(None, connection.publish(topic, payloads)))
    if refusals:
        connection.close(refusals[0])
    if connection.lost:
        raise SinkDown(connection.lost)


def discovery(device: str, line: str) -> dict[str, Any]:
    """The discovery message of a line: the device, and an entity for each value to show."""
    components = {
        "label": {"platform": "sensor", "name": "Label", "icon": "mdi:tag"},
        "confidence": {
            "platform": "sensor",
            "name": "Confidence",
            "unit_of_measurement": "%",
            "state_class": "measurement",
        },
        "defect": {"platform": "binary_sensor", "name": "Defect", "icon": "mdi:alert-decagram"},
        "untaught": {
            "platform": "binary_sensor",
            "name": "Class never taught here",
            "icon": "mdi:tag-off",
        },
        "problem": {"platform": "binary_sensor", "name": "Problem", "device_class": "problem"},
        "message": {"platform": "sensor", "name": "Message", "entity_category": "diagnostic"},
        "parts": {"platform": "sensor", "name": "Parts", "state_class": "total_increasing"},
        "defects": {"platform": "sensor", "name": "Defects", "state_class": "total_increasing"},
        "failures": {"platform": "sensor", "name": "Failures", "state_class": "total_increasing"},
    }
    base = topic(line)
    return {
        "device": {
            "identifiers": [device],
            "name": line,
            "manufacturer": "edge-node",
            "model": "inspection line",
        },
        "origin": {"name": "edge-node"},
        "components": {
            name: each
            | {"unique_id": f"{device}-{name}", "value_template": f"{{{{ value_json.{name} }}}}"}
            for name, each in components.items()
        },
        "state_topic": f"{base}/state",
        "availability_topic": f"{base}/availability",
        "qos": 1,
    }


def _on_off(on: bool) -> str:
    return "ON" if on else "OFF"
