"""Status of the federations on a broker, from the messages that their coordinators have
published.
"""

import queue
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from msgspec import Struct, structs, to_builtins

from broker_config.mqtt.client import (
    Connected,
    Delivery,
    Disconnected,
    Endpoint,
    MqttClient,
    read_retained,
)
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import EdgeNodeError, suggest
from broker_config.protocol.federation_kinds import KINDS, kind_of
from broker_config.protocol.messages import (
    Message,
    NodeState,
    Overview,
    Presence,
    RoundState,
    Spec,
    Stage,
)
from edge.terminal.formatting import natural_key

_RETAINED_TIMEOUT = 3.0  # seconds to wait for retained messages
_POLL_INTERVAL = 0.2  # seconds


class FederationStatus(Struct, frozen=True, kw_only=True):
    """Status of one federation, an object of `status --json`. Durations are seconds, as of now."""

    federation: str
    run: str
    method: str
    model: str
    rule: str  # of aggregation
    online: bool  # the coordinator
    status: Stage
    reason: str  # why it was aborted
    round: int
    rounds: int
    quorum: int
    start: int  # nodes that open the first round
    # of the coordinator's overview; None: there is none, so what follows is unknown
    age: float | None = None
    contributions: int = 0  # to the open round
    paused: bool = False
    left: float | None = None  # until the round's deadline
    nodes: tuple[NodeState, ...] = ()
    more: int = 0  # nodes that did not fit into the overview
    certificates: dict[str, datetime] = {}  # member -> expiry of its certificate, where it is known
    charter: datetime | None = None  # expiry of the one in the user's own kit

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.status == "aborted" or (self.status == "finished" and not self.online)


class _LatestMessages(NamedTuple):
    """The latest messages of one federation."""

    spec: Spec | None = None
    state: RoundState | None = None
    presence: Presence | None = None
    overview: Overview | None = None
    overview_time: float = 0.0  # when the overview was made, by our clock


class StatusMonitor:
    """Status of all federations on a broker, or of one of them, kept up to date by their messages.

    Its attributes are replaced and never mutated, so that another thread may render it meanwhile.
    `clock` counts seconds, `now` is the time of day. The `endpoint` of a kit knows when that kit
    expires.
    """

    def __init__(
        self,
        federation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        endpoint: Endpoint | None = None,
    ):
        name = "+" if federation is None else topics.check_name(federation, "the federation's name")
        self.filters = (
            topics.spec(name),
            topics.round_state(name),
            topics.presence(name, topics.COORDINATOR),
            topics.status(name),
        )
        self.lost = ""  # why the connection is lost; empty while there is one
        self.unreadable: dict[str, str] = {}  # topic -> what is wrong with the message
        self.now = now
        self._clock = clock
        self._endpoint = endpoint
        self._payloads: dict[str, bytes] = {}
        self._latest: dict[str, _LatestMessages] = {}  # by federation
        self.others: dict[str, Message] = {}  # overviews of further kinds of federation, by name

    def update(self, topic: str, payload: bytes, *, retained: bool) -> bool:
        """Take account of a message; returns whether it changed anything."""
        if self._payloads.get(topic) == payload:
            return False
        self._payloads[topic] = payload
        self.unreadable = {
            other: error for other, error in self.unreadable.items() if other != topic
        }
        try:
            message = decode(payload, Message) if payload else None
        except DecodeError as error:
            self.unreadable = {**self.unreadable, topic: str(error)}
            return True
        name = topics.federation_of(topic)
        kind = kind_of(message) if message else ""
        if message and kind and isinstance(message, KINDS[kind].overview):
            self.others = {**self.others, name: message}
        latest = self._latest.get(name, _LatestMessages())
        self._latest = {**self._latest, name: self._replace(latest, message, retained)}
        return True

    def _replace(
        self, latest: _LatestMessages, message: Message | None, retained: bool
    ) -> _LatestMessages:
        match message:
            case Spec():
                return latest._replace(spec=message)
            case RoundState():
                return latest._replace(state=message)
            case Presence():
                return latest._replace(presence=message)
            case Overview(run=run, time=time) if (
                (old := latest.overview) and old.run == run and time < old.time
            ):
                pass  # delayed on its way, or replayed
            case Overview():
                # Only the age of a message that has waited on the broker must be computed from two
                # machines' clocks.
                age = max(0.0, (self.now() - message.time).total_seconds()) if retained else 0.0
                return latest._replace(overview=message, overview_time=self._clock() - age)
        return latest

    def is_online(self, name: str) -> bool:
        """Whether the coordinator of a federation is connected, as far as is known."""
        presence = self._latest.get(name, _LatestMessages()).presence
        return presence is None or presence.online

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to any of them."""
        ended = [KINDS[kind_of(each)].has_ended(each) for each in self.others.values()]
        return all((*ended, *(status.ended for status in self.statuses())))

    def statuses(self) -> list[FederationStatus]:
        """Status of each federation whose spec is known, ordered by name."""
        latest = self._latest
        now = self._clock()
        statuses = [
            _status(latest[name], now)
            for name in sorted(latest, key=natural_key)
            if latest[name].spec
        ]
        return (
            [_with_kit_expiry(status, self._endpoint) for status in statuses]
            if self._endpoint
            else statuses
        )


def _status(latest: _LatestMessages, now: float) -> FederationStatus:
    spec = latest.spec
    presence = latest.presence
    assert spec is not None
    state = latest.state if latest.state and latest.state.run == spec.run else None
    chosen_status = state.status if state else "gathering"
    reason = state.reason if state and state.status == "aborted" else ""
    round_ = state.round if state else 0
    start = spec.nodes if spec.sample else spec.quorum
    status = FederationStatus(
        federation=spec.federation,
        run=spec.run,
        method=spec.method,
        model=spec.model,
        rule=spec.aggregation.rule,
        online=presence is not None and presence.online,
        status=chosen_status,
        reason=reason,
        round=round_,
        rounds=spec.rounds,
        quorum=spec.quorum,
        start=start,
    )
    overview = latest.overview
    if overview is None or overview.run != spec.run:
        return status
    age = now - latest.overview_time
    left = None if overview.left is None else max(0.0, overview.left - age)
    return structs.replace(
        status,
        round=overview.round,
        contributions=overview.contributions,
        paused=overview.paused,
        left=left,
        age=age,
        nodes=tuple(
            _aged(node, age)
            for node in sorted(overview.nodes, key=lambda node: natural_key(node.node))
        ),
        more=overview.more,
        certificates={node.node: node.expires for node in overview.nodes if node.expires},
    )


def _with_kit_expiry(status: FederationStatus, endpoint: Endpoint) -> FederationStatus:
    """The status, with what the user's own kit tells about certificates and the charter."""
    kit = endpoint.kit
    signer = endpoint.signer
    if kit is None or signer is None or status.federation != kit.federation:
        return status
    own = {topics.COORDINATOR: signer.members.coordinator.expires, kit.name: kit.expires()}
    return structs.replace(
        status, certificates=status.certificates | own, charter=signer.members.expires
    )


def _aged(node: NodeState, age: float) -> NodeState:
    return node if node.heard is None else structs.replace(node, heard=node.heard + age)


def fetch(endpoint: Endpoint, federation: str | None) -> StatusMonitor:
    """Read the retained status of all federations on a broker, or of the named one.

    Raises:
        BrokerError: the broker cannot be reached.
        EdgeNodeError: there is no federation, or none of this name.
    """
    monitor = StatusMonitor(federation, endpoint=endpoint)
    for topic, payload in read_retained(endpoint, monitor.filters, _RETAINED_TIMEOUT).items():
        monitor.update(topic, payload, retained=True)
    if monitor.statuses() or monitor.others or monitor.unreadable:
        return monitor
    if federation is None:
        raise EdgeNodeError(
            f"there is no federation on {endpoint}",
            "start edge-node coordinate, or check that this user may read the federation's "
            "topics on the broker",
        )
    others = [
        topics.federation_of(topic)
        for topic in read_retained(endpoint, [topics.spec("+")], _RETAINED_TIMEOUT)
    ]
    raise EdgeNodeError(
        f"there is no federation {federation!r} on {endpoint}", suggest(federation, sorted(others))
    )


def follow(endpoint: Endpoint, monitor: StatusMonitor, stop: Callable[[], bool]) -> Iterator[None]:
    """Keep the monitor up to date until `stop` says so or all its federations have ended;
    yields after each change.
    """
    inbox: queue.Queue[Any] = queue.Queue()
    with MqttClient(
        endpoint, f"status-{secrets.token_hex(8)}", inbox=inbox, persistent=False
    ) as mqtt:
        mqtt.subscribe(*monitor.filters, qos=0)
        while not stop() and not monitor.ended:
            try:
                event = inbox.get(timeout=_POLL_INTERVAL)
            except queue.Empty:
                continue
            if _handle(monitor, event):
                yield


def _handle(monitor: StatusMonitor, event: Delivery | Connected | Disconnected) -> bool:
    match event:
        case Delivery():
            return monitor.update(event.topic, event.payload, retained=event.retain)
        case Disconnected():
            monitor.lost = event.reason
            return True
        case Connected():
            was = monitor.lost
            monitor.lost = ""
            return bool(was)


def json_object(status: FederationStatus) -> dict[str, Any]:
    """A federation for machines: every field, also those with their default value."""
    return {**structs.asdict(status), "nodes": [structs.asdict(node) for node in status.nodes]}


def json_objects(monitor: StatusMonitor) -> list[dict[str, Any]]:
    """All federations for machines, those of further kinds last."""
    others = [
        {"federation": name, **to_builtins(overview)} for name, overview in monitor.others.items()
    ]
    return [*map(json_object, monitor.statuses()), *others]
