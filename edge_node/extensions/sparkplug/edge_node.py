"""A Sparkplug edge node with one device, as a state machine: no connection, no clock, no file.

Its methods return the messages to publish, in this order, on one connection.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from edge.inference.outcomes import Outcome, Verdict
from edge_node.extensions.sparkplug.line_metrics import (
    BIRTH_DEATH,
    DEVICE,
    NODE,
    REBIRTH,
    MetricValues,
    milliseconds,
    totals_of,
    values_of,
)
from edge_node.extensions.sparkplug.payload import Metric, Type, Value, encode, true_metrics

NAMESPACE = "spBv1.0"
SEQUENCES = 256  # both seq and bdSeq return to 0 after 255


class Identity(NamedTuple):
    """The names that identify an edge node and its device."""

    group: str
    node: str
    device: str
    host: str = ""  # the primary host application; none is waited for

    def check(self) -> "Identity":
        """Itself; UsageError when one of its names cannot be part of a topic."""
        for role, name in zip(("group", "node", "device", "host"), self, strict=True):
            if (not name and role != "host") or not name.isprintable() or set(name) & set("/+#"):
                raise UsageError(
                    f"a Sparkplug {role} cannot be {name!r}",
                    "give it a name without '/', '+', '#' and control characters",
                )
        return self

    def topic(self, kind: str) -> str:
        """The topic of a kind of message: those of the device begin with D."""
        device = f"/{self.device}" if kind.startswith("D") else ""
        return f"{NAMESPACE}/{self.group}/{kind}/{self.node}{device}"

    @property
    def filters(self) -> list[tuple[str, int]]:
        """Its subscriptions with their QoS: commands, the host's state,
        and what it publishes itself.
        """
        state = [self.state] if self.host else []
        incoming = [self.topic("NCMD"), *state]
        return [(topic, 1) for topic in incoming] + [
            (self.topic(kind), 0) for kind in ("NBIRTH", "DBIRTH", "DDATA")
        ]

    @property
    def state(self) -> str:
        """The topic on which the primary host application says whether it is online."""
        return f"{NAMESPACE}/STATE/{self.host}"


class Message(NamedTuple):
    """A message to publish; never retained."""

    topic: str
    payload: bytes
    qos: int = 0


class Request(Enum):
    """What a message from a host asks for."""

    NOTHING = "nothing"
    REBIRTH = "births"
    ONLINE = "births, since the primary host is there now"
    OFFLINE = "deaths and a new connection, since the primary host has gone"


class _State(Struct):
    """A STATE message, from a host application."""

    online: bool
    timestamp: int  # milliseconds since 1970


class EdgeNode:
    """Composes and numbers the messages.

    On each connection: `will`, then `births`, then any number of others.
    """

    def __init__(self, identity: Identity, version: str, clock: Callable[[], int]) -> None:
        self.identity = identity
        self.host_online = not identity.host
        self._clock = clock  # milliseconds since 1970
        self._seq = 0  # of the next message
        self._birth_death = 0
        self._born = False  # on this connection
        self._host_time = 0  # of the latest STATE message
        self._node = MetricValues(NODE)
        self._device = MetricValues(DEVICE)
        self._node.put(
            {REBIRTH: False, "Properties/Software": "edge-node", "Properties/Version": version},
            clock(),
        )
        self._totals = {name: 0 for name in DEVICE if name.startswith("Total/")}
        self._unsent: dict[str, Value] = {}  # totals that have changed since they were sent
        self._counted = -1  # the latest outcome in the totals

    def will(self, birth_death: int) -> Message:
        """The death certificate of a connection that is about to be made."""
        self._birth_death = birth_death
        self._born = False
        self.host_online = not self.identity.host
        return self._death()

    def births(self) -> list[Message]:
        """Node and device in full; the sequence begins again."""
        now = self._clock()
        self._seq = 0
        self._born = True
        self._node.put({BIRTH_DEATH: self._birth_death}, now)
        self._device.put(self._totals, now)
        self._unsent.clear()
        return [
            self._numbered("NBIRTH", self._node.birth(now), now),
            self._numbered("DBIRTH", self._device.birth(now), now),
        ]

    def data(self, seq: int, outcome: Outcome, *, historical: bool) -> list[Message]:
        """The messages for an outcome, preceded by the model that it is from,
        when that has changed.

        Totals are never historical: after the last historical outcome, send `totals`.
        """
        time = milliseconds(outcome.time)
        messages = []
        if isinstance(outcome, Verdict):
            model: dict[str, Value] = {
                "Properties/Bundle": outcome.bundle,
                "Properties/Model": outcome.model,
            }
            messages = self._model_messages(model, time)
        values = values_of(seq, outcome)
        self._device.update(values, time)
        self._count(seq, outcome)
        metrics = self._device.data(values, time, historical=historical)
        if not historical:
            metrics += self._changed_totals(time)
        return [*messages, self._numbered("DDATA", metrics, self._clock())]

    def totals(self) -> list[Message]:
        """The totals, if they have changed since they were sent."""
        now = self._clock()
        return [self._numbered("DDATA", self._changed_totals(now), now)] if self._unsent else []

    def deaths(self) -> list[Message]:
        """The deaths of the device, if born, and of the node,
        before the connection is closed deliberately.
        """
        device = [self._numbered("DDEATH", [], self._clock())] if self._born else []
        return [*device, self._death()]

    def interpret(self, topic: str, payload: bytes) -> Request:
        """The request in a command or in the primary host's state;
        ValueError when it cannot be decoded.
        """
        if topic == self.identity.topic("NCMD"):
            return Request.REBIRTH if REBIRTH in true_metrics(payload) else Request.NOTHING
        return (
            self._interpret_state(msgspec.json.decode(payload, type=_State))
            if topic == self.identity.state
            else Request.NOTHING
        )

    def _interpret_state(self, state: _State) -> Request:
        if state.timestamp < self._host_time:
            raise ValueError(f"its timestamp {state.timestamp} is older than {self._host_time}")
        self._host_time = state.timestamp
        before = self.host_online
        self.host_online = state.online
        if before == state.online:
            return Request.NOTHING
        return Request.ONLINE if state.online else Request.OFFLINE

    def _model_messages(self, found: dict[str, Value], time: int) -> list[Message]:
        """The node's properties, when they have changed."""
        before = {name: self._node[name] for name in found}
        self._node.update(found, time)
        changed = {name: value for name, value in found.items() if self._node[name] != before[name]}
        return (
            [
                self._numbered(
                    "NDATA", self._node.data(changed, time, historical=False), self._clock()
                )
            ]
            if changed
            else []
        )

    def _count(self, seq: int, outcome: Outcome) -> None:
        """Count each outcome once, however often it is sent."""
        if seq <= self._counted:
            return
        self._counted = seq
        for name in totals_of(outcome):
            self._totals[name] += 1
            self._unsent[name] = self._totals[name]

    def _changed_totals(self, time: int) -> list[Metric]:
        metrics = self._device.data(self._unsent, time, historical=False)
        self._unsent.clear()
        return metrics

    def _numbered(self, kind: str, metrics: list[Metric], now: int) -> Message:
        seq = self._seq
        self._seq = (self._seq + 1) % SEQUENCES
        return Message(self.identity.topic(kind), encode(metrics, now, seq))

    def _death(self) -> Message:
        now = self._clock()
        metric = Metric(Type.INT64, self._birth_death, now, name=BIRTH_DEATH)
        return Message(self.identity.topic("NDEATH"), encode([metric], now, None), qos=1)
