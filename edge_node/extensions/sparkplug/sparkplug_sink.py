"""Sink for a Sparkplug host: births, rebirths and deaths of the edge node,
and the data between them.

Sparkplug requires QoS 0 for data, which nobody acknowledges. The node therefore subscribes to what
it publishes, and an outcome counts as delivered once the broker has sent it back. That also reveals
an access list that lets the node connect but drops its messages.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version

import msgspec

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError, abbreviate
from edge.sinks.sink import Item, SinkDown
from edge_node.extensions.sparkplug.birth_state import BirthState
from edge_node.extensions.sparkplug.edge_node import EdgeNode, Identity, Message, Request
from edge_node.extensions.sparkplug.sparkplug_connection import Connection

_FIRST_CONNECT = 5.0  # seconds for the first connection
_STATE = 1.0  # seconds for the primary host's retained STATE message
_CLOSE = 5.0  # seconds
_DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between attempts to connect
_WINDOW = 100  # outcomes in flight; fewer than there are sequence numbers, so that no two share one

_log = logging.getLogger(__name__)


class Sparkplug:
    """Publishes outcomes as DDATA.

    From the first `deliver` on a thread maintains the connection, whether there are outcomes or
    not.
    """

    def __init__(
        self, endpoint: Endpoint, identity: Identity, state: BirthState, echo: float = 10.0
    ) -> None:
        """`echo`: seconds in which what was published comes back."""
        self.name = (
            f"sparkplug:{endpoint.host}:{endpoint.port}/{identity.group}/"
            f"{identity.node}/{identity.device}"
        )
        self._endpoint = endpoint
        self._identity = identity
        self._birth_state = state
        self._echo = echo
        self._node = EdgeNode(identity, version("edge-node"), lambda: time.time_ns() // 1_000_000)
        self._changed = threading.Condition()  # guards all below, and the node
        self._connection: Connection | None = None
        self._why = ""  # why nothing can be delivered; empty during the first attempt to connect
        self._births: deque[bytes] = deque(maxlen=100)  # NBIRTHs of this connection
        self._unseen_births: set[bytes] = set()  # births that have not come back
        self._due = 0.0  # when they should have, by the monotonic clock
        self._is_born = False  # the births have come back: data may follow
        self._is_host_gone = False  # the primary host has gone offline: this connection must end
        self._has_warned = False  # of an unreadable message on this connection
        self._closing = False
        self._published = -1  # the latest outcome
        # messages that have not come back -> the outcome that each is of
        self._unseen: dict[bytes, int] = {}
        self._thread = threading.Thread(target=self._run, name="sparkplug", daemon=True)

    def deliver(self, items: Sequence[Item]) -> None:
        """Publish outcomes and wait for them to come back;
        SinkDown with the number of those that did in a row.
        """
        if not self._thread.ident:
            self._thread.start()
        for start in range(0, max(len(items), 1), _WINDOW):
            self._deliver(items[start : start + _WINDOW], start)

    def close(self) -> None:
        """Publish the deaths of device and node, and disconnect."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident:
            self._thread.join(_CLOSE)

    def _deliver(self, items: Sequence[Item], before: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_born or self._why, _FIRST_CONNECT)
            if not (connection := self._connection) or not self._is_born:
                raise SinkDown(self._why or f"{self._endpoint} has not answered yet", before)
            for item in items:
                self._publish(connection, item)
            self._changed.wait_for(
                lambda: not self._unseen or connection is not self._connection, self._echo
            )
            missing = set(self._unseen.values())
            self._unseen = {}
            if missing:
                done = next(number for number, item in enumerate(items) if item.seq in missing)
                why = f"{self._endpoint} sends nothing back" if self._is_born else self._why
                raise SinkDown(why, before + done)
            for message in self._node.totals():
                connection.publish(message)

    def _publish(self, connection: Connection, item: Item) -> None:
        historical = item.replayed or item.seq <= self._published
        self._published = max(self._published, item.seq)
        messages = self._node.data(item.seq, item.outcome, historical=historical)
        self._unseen[messages[-1].payload] = item.seq
        for message in messages:
            connection.publish(message)

    def _run(self) -> None:
        """Connect, repeatedly, until the sink is closed."""
        failures = 0
        while not self._closing:
            failures = 0 if self._session() else failures + 1
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing, _DELAYS[min(failures, len(_DELAYS) - 1)]
                )

    def _session(self) -> bool:
        """One connection from its beginning to its end; whether its births came back."""
        with self._changed:
            self._births.clear()
            self._unseen_births = set()
            self._is_host_gone = self._has_warned = False
        try:
            connection = Connection(
                self._endpoint,
                self._birth_state.client,
                self._certify,
                self._identity.filters,
                self._on_message,
                self._notify,
            )
        except EdgeNodeError as error:
            self._fail(error.what)
            return False
        with self._changed:
            self._connection = connection
            if self._node.host_online:
                self._publish_births(connection)
            was_born = self._wait_for_end(connection)
            self._is_born = False
            self._connection = None
            self._changed.notify_all()
            last = self._node.deaths()
        connection.close(last)
        return was_born

    def _certify(self) -> Message:
        with self._changed:
            return self._node.will(self._birth_state.next_birth_death())

    def _wait_for_end(self, connection: Connection) -> bool:
        """Wait until a connection has ended or must end; whether its births came back."""

        def is_over() -> bool:
            return connection.lost.is_set() or self._is_host_gone or self._closing

        if not self._changed.wait_for(lambda: self._births or is_over(), _STATE):
            self._fail(f"the primary host {self._identity.host} is not online")
        self._changed.wait_for(lambda: self._births or is_over())
        self._changed.wait_for(lambda: self._is_born or is_over(), self._echo)
        was_born = self._is_born
        if was_born:
            self._changed.wait_for(is_over)
        if self._is_host_gone:
            self._fail(f"the primary host {self._identity.host} has gone offline")
        elif self._births and not was_born and not self._closing:
            self._fail(
                f"{self._endpoint} does not send back the births of "
                f"{self._identity.group}/{self._identity.node}: its access list may not let this "
                "user write and read them"
            )
        elif connection.lost.is_set():
            self._fail(f"the connection to {self._endpoint} is lost")
        return was_born

    def _publish_births(self, connection: Connection) -> None:
        node, device = self._node.births()
        self._births.append(node.payload)
        self._unseen_births = {node.payload, device.payload}
        self._due = time.monotonic() + self._echo
        connection.publish(node)
        connection.publish(device)

    def _on_message(self, connection: Connection, topic: str, payload: bytes) -> None:
        """Handle a message, in the connection's thread."""
        with self._changed:
            if payload in self._unseen_births:
                self._unseen_births.discard(payload)
                self._is_born |= (
                    not self._unseen_births
                    and connection is self._connection
                    and not self._is_host_gone
                )
            elif self._unseen.pop(payload, None) is None:
                self._handle_foreign(connection, topic, payload)
            self._changed.notify_all()

    def _handle_foreign(self, connection: Connection, topic: str, payload: bytes) -> None:
        """Handle a message from somebody else."""
        if topic == self._identity.topic("NBIRTH") and payload not in self._births:
            _log.error("another edge node at %s is %s/%s too", self._endpoint, *self._identity[:2])
        try:
            request = self._node.interpret(topic, payload)
        except (ValueError, msgspec.MsgspecError) as error:
            if not self._has_warned:
                _log.warning("ignored a message on %s: %s", topic, abbreviate(str(error)))
            self._has_warned = True  # logged once for each connection
            return
        if connection is not self._connection:
            return  # not in use yet: its session checks the host's state itself
        if request is Request.OFFLINE:
            self._is_born = False
            self._is_host_gone = True
        elif request is Request.ONLINE or (
            request is Request.REBIRTH and self._births and not self._is_awaiting_births()
        ):
            self._publish_births(connection)

    def _is_awaiting_births(self) -> bool:
        """Whether births are in flight: they answer every request until then."""
        return bool(self._unseen_births) and time.monotonic() < self._due

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fail(self, why: str) -> None:
        """Record why nothing can be delivered."""
        with self._changed:
            self._why = why
            self._changed.notify_all()
