"""Watching federations from outside: what their coordinators have published, as one picture of each."""

import queue
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from msgspec import Struct, structs, to_builtins

from broker_config.mqtt.client import Connected, Delivery, Disconnected, Endpoint, MqttClient, probe
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import EdgeNodeError, nearest
from broker_config.protocol.messages import Message, NodeState, Overview, Presence, RoundState, Spec, Stage
from broker_config.protocol.vfl_messages import LineOverview
from edge.terminal.formatting import natural_key

_WAIT = 3.0  # seconds for what is retained
_TICK = 0.2  # seconds


class View(Struct, frozen=True, kw_only=True):
    """One federation as it stands. Times are seconds, as of now."""

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
    age: float | None = None  # of the coordinator's overview; None: there is none, and what follows is not known
    contributions: int = 0  # to the open round
    paused: bool = False
    left: float | None = None  # until the round's deadline
    nodes: tuple[NodeState, ...] = ()
    more: int = 0  # nodes that are not listed
    certificates: dict[str, datetime] = {}  # member -> when its certificate ends, where that is known
    charter: datetime | None = None  # when that in the kit of whoever watches does

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.status == "aborted" or (self.status == "finished" and not self.online)


class _Known(NamedTuple):
    """The newest messages of one federation."""

    spec: Spec | None = None
    state: RoundState | None = None
    presence: Presence | None = None
    overview: Overview | None = None
    made: float = 0.0  # when the overview was, by our clock


class Picture:
    """What is retained of the federations on a broker, or of one of them.

    What it holds is replaced and never changed, so that another thread may draw it meanwhile. `clock` counts seconds,
    `now` is the time of day. The `endpoint` of a kit knows until when that holds.
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
            topics.spec(name), topics.round_state(name), topics.presence(name, topics.COORDINATOR), topics.status(name)
        )  # fmt: skip
        self.lost = ""  # why there is no connection
        self.unreadable: dict[str, str] = {}  # topic -> what is wrong with the message
        self.now = now
        self._clock, self._endpoint = clock, endpoint
        self._payloads: dict[str, bytes] = {}
        self._known: dict[str, _Known] = {}
        self.learning: dict[str, LineOverview] = {}  # lines whose sensors learn together, by their federations

    def take(self, topic: str, payload: bytes, *, retained: bool) -> bool:
        """Take in a message; returns whether it says anything new."""
        if self._payloads.get(topic) == payload:
            return False
        self._payloads[topic] = payload
        self.unreadable = {other: error for other, error in self.unreadable.items() if other != topic}
        try:
            message = decode(payload, Message) if payload else None
        except DecodeError as error:
            self.unreadable = {**self.unreadable, topic: str(error)}
            return True
        name = topics.federation_of(topic)
        if isinstance(message, LineOverview):
            self.learning = {**self.learning, name: message}
        self._known = {**self._known, name: self._with(self._known.get(name, _Known()), message, retained)}
        return True

    def _with(self, known: _Known, message: Message | None, retained: bool) -> _Known:
        match message:
            case Spec():
                return known._replace(spec=message)
            case RoundState():
                return known._replace(state=message)
            case Presence():
                return known._replace(presence=message)
            case Overview(run=run, time=time) if (old := known.overview) and old.run == run and time < old.time:
                pass  # it was under way for long, or somebody says it again
            case Overview():
                # Only of a message that has waited at the broker must the two clocks tell the age.
                age = max(0.0, (self.now() - message.time).total_seconds()) if retained else 0.0
                return known._replace(overview=message, made=self._clock() - age)
        return known

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to any of them."""
        ended = [each.status == "finished" for each in self.learning.values()]
        return all((*ended, *(view.ended for view in self.views())))

    def views(self) -> list[View]:
        """The federations, by name."""
        known = self._known
        views = [_view(known[name], self._clock()) for name in sorted(known, key=natural_key) if known[name].spec]
        return [_with_kit(view, self._endpoint) for view in views] if self._endpoint else views


def _view(known: _Known, now: float) -> View:
    spec, presence = known.spec, known.presence
    assert spec is not None
    state = known.state if known.state and known.state.run == spec.run else None
    view = View(
        federation=spec.federation,
        run=spec.run,
        method=spec.method,
        model=spec.model,
        rule=spec.aggregation.rule,
        online=presence is not None and presence.online,
        status=state.status if state else "gathering",
        reason=state.reason if state and state.status == "aborted" else "",
        round=state.round if state else 0,
        rounds=spec.rounds,
        quorum=spec.quorum,
        start=spec.start or spec.nodes,
    )
    overview = known.overview
    if overview is None or overview.run != spec.run:
        return view
    age = now - known.made
    return structs.replace(
        view,
        round=overview.round,
        contributions=overview.contributions,
        paused=overview.paused,
        left=None if overview.left is None else max(0.0, overview.left - age),
        age=age,
        nodes=tuple(_aged(node, age) for node in sorted(overview.nodes, key=lambda node: natural_key(node.node))),
        more=overview.more,
        certificates={node.node: node.expires for node in overview.nodes if node.expires},
    )


def _with_kit(view: View, endpoint: Endpoint) -> View:
    """With what is known of a federation from our kit."""
    kit, seal = endpoint.kit, endpoint.seal
    if kit is None or seal is None or view.federation != kit.federation:
        return view
    ours = {topics.COORDINATOR: seal.charter.coordinator.expires, kit.name: kit.expires()}
    return structs.replace(view, certificates=view.certificates | ours, charter=seal.charter.expires)


def _aged(node: NodeState, age: float) -> NodeState:
    return node if node.heard is None else structs.replace(node, heard=node.heard + age)


def look(endpoint: Endpoint, federation: str | None) -> Picture:
    """What the broker knows of its federations, or of the named one.

    Raises:
        BrokerError: the broker cannot be reached.
        EdgeNodeError: there is no federation, or none of this name.
    """
    picture = Picture(federation, endpoint=endpoint)
    for topic, payload in probe(endpoint, picture.filters, _WAIT).items():
        picture.take(topic, payload, retained=True)
    if picture.views() or picture.learning or picture.unreadable:
        return picture
    if federation is None:
        raise EdgeNodeError(
            f"there is no federation on {endpoint}",
            "start edge-node coordinate, or check that this user may read the federation's topics on the broker",
        )
    others = [topics.federation_of(topic) for topic in probe(endpoint, [topics.spec("+")], _WAIT)]
    raise EdgeNodeError(f"there is no federation {federation!r} on {endpoint}", nearest(federation, sorted(others)))


def follow(endpoint: Endpoint, picture: Picture, stop: Callable[[], bool]) -> Iterator[None]:
    """Keep the picture true until `stop` says so or all its federations have ended; yields after each change."""
    inbox: queue.Queue[Any] = queue.Queue()
    with MqttClient(endpoint, f"status-{secrets.token_hex(8)}", inbox=inbox, persistent=False) as mqtt:
        mqtt.subscribe(*picture.filters, qos=0)
        while not stop() and not picture.ended:
            try:
                event = inbox.get(timeout=_TICK)
            except queue.Empty:
                continue
            if _changed(picture, event):
                yield


def _changed(picture: Picture, event: Delivery | Connected | Disconnected) -> bool:
    match event:
        case Delivery():
            return picture.take(event.topic, event.payload, retained=event.retain)
        case Disconnected():
            picture.lost = event.reason
            return True
        case Connected():
            was, picture.lost = picture.lost, ""
            return bool(was)


def as_builtins(view: View) -> dict[str, Any]:
    """A view for machines: every field, also those that have their default."""
    return {**structs.asdict(view), "nodes": [structs.asdict(node) for node in view.nodes]}


def objects(picture: Picture) -> list[dict[str, Any]]:
    """All federations and lines, for machines."""
    lines = [{"federation": name, **to_builtins(each)} for name, each in picture.learning.items()]
    return [*map(as_builtins, picture.views()), *lines]
