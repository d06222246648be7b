"""A Sparkplug edge node with one device, as a state machine: no connection, no clock, no file.

What must be sent comes back as messages, to be published in this order on one connection.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from edge.inference.verdict import Outcome, Verdict
from edge.sinks.sparkplug.line_metrics import BIRTH_DEATH, DEVICE, NODE, REBIRTH, Board, counted, milliseconds, values
from edge.sinks.sparkplug.payload import Metric, Type, Value, encode, switched_on

NAMESPACE = "spBv1.0"
SEQUENCES = 256  # both seq and bdSeq return to 0 after 255


class Identity(NamedTuple):
    """Who an edge node is."""

    group: str
    node: str
    device: str
    host: str = ""  # the primary host application; none is waited for

    def check(self) -> "Identity":
        """Itself; UsageError when a topic cannot hold one of its names."""
        for what, name in zip(("group", "node", "device", "host"), self, strict=True):
            if (not name and what != "host") or not name.isprintable() or set(name) & set("/+#"):
                raise UsageError(
                    f"a Sparkplug {what} cannot be {name!r}",
                    "give it a name without '/', '+', '#' and control characters",
                )
        return self

    def topic(self, kind: str) -> str:
        """The topic of a kind of message: those of the device begin with D."""
        device = f"/{self.device}" if kind.startswith("D") else ""
        return f"{NAMESPACE}/{self.group}/{kind}/{self.node}{device}"

    @property
    def filters(self) -> list[tuple[str, int]]:
        """What it subscribes to, and with which QoS: commands, the host's state, and what it publishes itself."""
        heard = [self.topic("NCMD"), *([self.state] if self.host else [])]
        return [(topic, 1) for topic in heard] + [(self.topic(kind), 0) for kind in ("NBIRTH", "DBIRTH", "DDATA")]

    @property
    def state(self) -> str:
        """The topic on which the primary host application says whether it is online."""
        return f"{NAMESPACE}/STATE/{self.host}"


class Message(NamedTuple):
    """Something to publish; never retained."""

    topic: str
    payload: bytes
    qos: int = 0


class Heard(Enum):
    """What a message from a host asks for."""

    NOTHING = "nothing"
    REBIRTH = "births"
    ONLINE = "births, since the primary host is there now"
    OFFLINE = "deaths and a new connection, since the primary host has gone"


class _State(Struct):
    """What a host application says of itself."""

    online: bool
    timestamp: int  # milliseconds since 1970


class EdgeNode:
    """Numbers and fills the messages. On each connection: `will`, then `births`, then any number of others."""

    def __init__(self, identity: Identity, version: str, clock: Callable[[], int]) -> None:
        self.identity = identity
        self.host_online = not identity.host
        self._clock = clock  # milliseconds since 1970
        self._seq = 0  # of the next message
        self._birth_death = 0
        self._born = False  # on this connection
        self._host_time = 0  # of the latest STATE message
        self._node, self._device = Board(NODE), Board(DEVICE)
        self._node.put({REBIRTH: False, "Properties/Software": "edge-node", "Properties/Version": version}, clock())
        self._totals = {name: 0 for name in DEVICE if name.startswith("Total/")}
        self._untold: dict[str, Value] = {}  # totals that have changed since they were sent
        self._counted = -1  # the latest outcome in the totals

    def will(self, birth_death: int) -> Message:
        """The death certificate of a connection that is about to be made."""
        self._birth_death, self._born = birth_death, False
        self.host_online = not self.identity.host
        return self._death()

    def births(self) -> list[Message]:
        """Node and device in full; the sequence begins again."""
        now, self._seq, self._born = self._clock(), 0, True
        self._node.put({BIRTH_DEATH: self._birth_death}, now)
        self._device.put(self._totals, now)
        self._untold.clear()
        return [
            self._numbered("NBIRTH", self._node.birth(now), now),
            self._numbered("DBIRTH", self._device.birth(now), now),
        ]

    def data(self, seq: int, outcome: Outcome, *, historical: bool) -> list[Message]:
        """What an outcome says; before it the model that it is of, when that is another.

        Totals are never historical: after the last outcome that is, send `totals`.
        """
        time, messages = milliseconds(outcome.time), []
        if isinstance(outcome, Verdict):
            messages = self._model({"Properties/Bundle": outcome.bundle, "Properties/Model": outcome.model}, time)
        said = values(seq, outcome)
        self._device.learn(said, time)
        self._count(seq, outcome)
        metrics = self._device.data(said, time, historical=historical)
        if not historical:
            metrics += self._changed_totals(time)
        return [*messages, self._numbered("DDATA", metrics, self._clock())]

    def totals(self) -> list[Message]:
        """The totals, if they have changed since they were sent."""
        now = self._clock()
        return [self._numbered("DDATA", self._changed_totals(now), now)] if self._untold else []

    def deaths(self) -> list[Message]:
        """What was born, and the node in any case, before the connection is closed on purpose."""
        device = [self._numbered("DDEATH", [], self._clock())] if self._born else []
        return [*device, self._death()]

    def hear(self, topic: str, payload: bytes) -> Heard:
        """What a command, or the primary host's state, asks for; ValueError when it cannot be read."""
        if topic == self.identity.topic("NCMD"):
            return Heard.REBIRTH if REBIRTH in switched_on(payload) else Heard.NOTHING
        return (
            self._hear_host(msgspec.json.decode(payload, type=_State))
            if topic == self.identity.state
            else Heard.NOTHING
        )

    def _hear_host(self, state: _State) -> Heard:
        if state.timestamp < self._host_time:
            raise ValueError(f"its timestamp {state.timestamp} is older than {self._host_time}")
        self._host_time = state.timestamp
        before, self.host_online = self.host_online, state.online
        if before == state.online:
            return Heard.NOTHING
        return Heard.ONLINE if state.online else Heard.OFFLINE

    def _model(self, found: dict[str, Value], time: int) -> list[Message]:
        """The node's properties, when they have changed."""
        before = {name: self._node[name] for name in found}
        self._node.learn(found, time)
        changed = {name: value for name, value in found.items() if self._node[name] != before[name]}
        return (
            [self._numbered("NDATA", self._node.data(changed, time, historical=False), self._clock())]
            if changed
            else []
        )

    def _count(self, seq: int, outcome: Outcome) -> None:
        """Each outcome once, however often it is sent."""
        if seq <= self._counted:
            return
        self._counted = seq
        for name in counted(outcome):
            self._totals[name] += 1
            self._untold[name] = self._totals[name]

    def _changed_totals(self, time: int) -> list[Metric]:
        metrics = self._device.data(self._untold, time, historical=False)
        self._untold.clear()
        return metrics

    def _numbered(self, kind: str, metrics: list[Metric], now: int) -> Message:
        seq, self._seq = self._seq, (self._seq + 1) % SEQUENCES
        return Message(self.identity.topic(kind), encode(metrics, now, seq))

    def _death(self) -> Message:
        now = self._clock()
        metric = Metric(Type.INT64, self._birth_death, now, name=BIRTH_DEATH)
        return Message(self.identity.topic("NDEATH"), encode([metric], now, None), qos=1)
