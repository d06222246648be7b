"""The connection of a Sparkplug edge node to its broker: births, rebirths, deaths, and the data between them.

Sparkplug wants its data published with QoS 0, which nobody acknowledges. An outcome counts as delivered once the broker
has sent its message back: the node subscribes to what it publishes. That also shows an access list that lets the node
connect, but drops what it says.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError, brief
from edge.sinks.sink import Item, SinkDown
from edge.sinks.sparkplug import Settings
from edge.sinks.sparkplug.birth_state import Memory
from edge.sinks.sparkplug.edge_node import EdgeNode, Heard, Identity, Message
from edge.sinks.sparkplug.sparkplug_connection import Connection

_ECHO = 10.0  # seconds in which what was published comes back
_PATIENCE = 5.0  # seconds for the first connection
_STATE = 1.0  # seconds in which the broker says what the primary host has said last
_CLOSE = 5.0  # seconds
_DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between attempts to connect
_WINDOW = 100  # outcomes that are under way at once; fewer than there are sequence numbers, so no two are the same

_log = logging.getLogger(__name__)


def opened(settings: Settings, line: str, folder: Path) -> "Sparkplug":
    """The sink that they describe; UsageError when a name or a file cannot be used. `folder` is for its memory."""
    ca, cert, key = (Path(each) if each else None for each in (settings.ca, settings.cert, settings.key))
    endpoint = Endpoint.parse(settings.url, ca=ca, cert=cert, key=key)
    if endpoint.tls:
        endpoint.tls_context()  # unusable files are found now
    identity = Identity(settings.group, settings.node or line, settings.device, settings.host).check()
    return Sparkplug(endpoint, identity, Memory(folder, endpoint, identity))


class Sparkplug:
    """Publishes outcomes as DDATA.

    From the first `deliver` on the connection is kept in a thread of its own, whether there are outcomes or not.
    """

    def __init__(self, endpoint: Endpoint, identity: Identity, memory: Memory) -> None:
        self.name = f"sparkplug:{endpoint.host}:{endpoint.port}/{identity.group}/{identity.node}/{identity.device}"
        self._endpoint, self._identity, self._memory = endpoint, identity, memory
        self._node = EdgeNode(identity, version("edge-node"), lambda: time.time_ns() // 1_000_000)
        self._changed = threading.Condition()  # guards all below, and the node
        self._connection: Connection | None = None
        self._why = ""  # nothing can be delivered; empty while the first attempt to connect is under way
        self._births: deque[bytes] = deque(maxlen=100)  # NBIRTHs of this connection
        self._unborn: set[bytes] = set()  # births that have not come back
        self._due = 0.0  # when they should have, by the monotonic clock
        self._alive = False  # the births have come back: data may follow
        self._leaving = False  # the primary host has gone: this connection is to be ended
        self._deaf = False  # a message on this connection could not be read
        self._closing = False
        self._published = -1  # the latest outcome
        self._unseen: dict[bytes, int] = {}  # messages that have not come back -> the outcome that each is of
        self._keeper = threading.Thread(target=self._keep, name="sparkplug", daemon=True)

    def deliver(self, items: Sequence[Item]) -> None:
        """Publish outcomes and see them come back; SinkDown with the number of those before the first that has not."""
        if not self._keeper.ident:
            self._keeper.start()
        for start in range(0, max(len(items), 1), _WINDOW):
            self._deliver(items[start : start + _WINDOW], start)

    def close(self) -> None:
        """Tell that device and node die, and disconnect."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._keeper.ident:
            self._keeper.join(_CLOSE)

    def _deliver(self, items: Sequence[Item], before: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._alive or self._why, _PATIENCE)
            if not (connection := self._connection) or not self._alive:
                raise SinkDown(self._why or f"{self._endpoint} has not answered yet", before)
            for item in items:
                self._publish(connection, item)
            self._changed.wait_for(lambda: not self._unseen or connection is not self._connection, _ECHO)
            missing, self._unseen = set(self._unseen.values()), {}
            if missing:
                taken = next(number for number, item in enumerate(items) if item.seq in missing)
                raise SinkDown(self._why if not self._alive else f"{self._endpoint} sends nothing back", before + taken)
            for message in self._node.totals():
                connection.publish(message)

    def _publish(self, connection: Connection, item: Item) -> None:
        historical = item.replayed or item.seq <= self._published
        self._published = max(self._published, item.seq)
        messages = self._node.data(item.seq, item.outcome, historical=historical)
        self._unseen[messages[-1].payload] = item.seq
        for message in messages:
            connection.publish(message)

    def _keep(self) -> None:
        """Connect, again and again, until the sink is closed."""
        failures = 0
        while not self._closing:
            failures = 0 if self._session() else failures + 1
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _DELAYS[min(failures, len(_DELAYS) - 1)])

    def _session(self) -> bool:
        """One connection from its beginning to its end; whether it came to life."""
        with self._changed:
            self._births.clear()
            self._unborn = set()
            self._leaving = self._deaf = False
        try:
            connection = Connection(
                self._endpoint, self._memory.client, self._certify, self._identity.filters, self._hear, self._notify
            )
        except EdgeNodeError as error:
            self._fail(error.what)
            return False
        with self._changed:
            self._connection = connection
            if self._node.host_online:
                self._bear(connection)
            lived = self._live(connection)
            self._alive, self._connection = False, None
            self._changed.notify_all()
            last = self._node.deaths()
        connection.close(last)
        return lived

    def _certify(self) -> Message:
        with self._changed:
            return self._node.will(self._memory.next())

    def _live(self, connection: Connection) -> bool:
        """Wait until a connection has ended or is to be ended; whether it came to life."""

        def over() -> bool:
            return connection.lost.is_set() or self._leaving or self._closing

        if not self._changed.wait_for(lambda: self._births or over(), _STATE):
            self._fail(f"the primary host {self._identity.host} is not online")
        self._changed.wait_for(lambda: self._births or over())
        self._changed.wait_for(lambda: self._alive or over(), _ECHO)
        lived = self._alive
        if lived:
            self._changed.wait_for(over)
        if self._leaving:
            self._fail(f"the primary host {self._identity.host} has gone offline")
        elif self._births and not lived and not self._closing:
            self._fail(
                f"{self._endpoint} does not send back the births of {self._identity.group}/{self._identity.node}: "
                "its access list may not let this user write and read them"
            )
        elif connection.lost.is_set():
            self._fail(f"the connection to {self._endpoint} is lost")
        return lived

    def _bear(self, connection: Connection) -> None:
        node, device = self._node.births()
        self._births.append(node.payload)
        self._unborn = {node.payload, device.payload}
        self._due = time.monotonic() + _ECHO
        connection.publish(node)
        connection.publish(device)

    def _hear(self, connection: Connection, topic: str, payload: bytes) -> None:
        """In the connection's thread."""
        with self._changed:
            if payload in self._unborn:
                self._unborn.discard(payload)
                self._alive |= not self._unborn and connection is self._connection and not self._leaving
            elif self._unseen.pop(payload, None) is None:
                self._obey(connection, topic, payload)
            self._changed.notify_all()

    def _obey(self, connection: Connection, topic: str, payload: bytes) -> None:
        """Do what somebody else's message asks for."""
        if topic == self._identity.topic("NBIRTH") and payload not in self._births:
            _log.error("another edge node at %s is %s/%s too", self._endpoint, *self._identity[:2])
        try:
            heard = self._node.hear(topic, payload)
        except (ValueError, msgspec.MsgspecError) as error:
            if not self._deaf:
                _log.warning("ignored a message on %s: %s", topic, brief(str(error)))
            self._deaf = True  # said once a connection
            return
        if connection is not self._connection:
            return  # not begun yet: the beginning looks at the host's state itself
        if heard is Heard.OFFLINE:
            self._alive, self._leaving = False, True
        elif heard is Heard.ONLINE or (heard is Heard.REBIRTH and self._births and not self._is_bearing()):
            self._bear(connection)

    def _is_bearing(self) -> bool:
        """Whether births are under way: they answer all who have asked until then."""
        return bool(self._unborn) and time.monotonic() < self._due

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fail(self, why: str) -> None:
        """Nothing can be delivered, and why."""
        with self._changed:
            self._why = why
            self._changed.notify_all()
