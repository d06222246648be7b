"""The broker's access list, tried: every topic, by everybody, in effect, against a real mosquitto with certificates."""

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from broker_config import access, topics
from broker_config.endpoint import Endpoint
from broker_config.errors import LinkError
from broker_config.handshake import MQTT5
from broker_config.topics import COORDINATOR, MONITOR, TRIAL
from edge.doctor.wire import Wire
from tests.certificates import Authority
from tests.test_doctor import configured

FEDERATION, FOREIGN = "steel", "wood"
NODES = ("plant-a", "plant-b")
STRANGER = "mallory"  # has a certificate of the federation's authority: only the charter tells that it is no member
ABSENT = "plant-c"  # a name that nobody has
USERS = (COORDINATOR, *NODES, MONITOR, STRANGER)
JOKER = "+"  # a certificate with a wildcard for its name
KING = "king"  # of the test: may do everything, so that everything can be seen to arrive or not
DIGEST = "0" * 64
NAMED = {
    "spec": 0,
    "round": 0,
    "status": 0,
    "presence": 1,
    "up": 1,
    "down": 1,
    "chunks": 1,
    "want": 2,
}  # kinds of topics

# The specification: who must; everybody else must not


def writers(kind: str, *names: str) -> set[str]:
    match kind, names:
        case "spec" | "round" | "status", ():
            return {COORDINATOR}
        case "presence" | "up" | "chunks", (name,):
            return {name} - {MONITOR}
        case "down", _:
            return {COORDINATOR}
        case "want", (holder, asker) if COORDINATOR in (holder, asker):  # nodes ask the coordinator only
            return {asker} - {MONITOR}
    return set()


def readers(kind: str, *names: str) -> set[str]:
    match kind, names:
        case ("spec" | "round", ()) | ("presence", ("coordinator",)):
            return {*USERS}
        case "status", ():
            return {COORDINATOR, MONITOR}
        case "up", _:
            return {COORDINATOR}
        case "presence", (name,):
            return {name, COORDINATOR} - {MONITOR}
        case "down", (name,):
            return {name} - {MONITOR}
        case "want", (holder, _):
            return {holder} - {MONITOR}
        case "chunks", ("coordinator",):
            return {*USERS} - {MONITOR}
        case "chunks", _:
            return {COORDINATOR}
    return set()


# The topics: of the federation, of the doctor's, of another one, of another version, and others


def topic(federation: str, kind: str, *names: str) -> str:
    if kind == "chunks":
        return topics.chunks(federation, *names, DIGEST, 262_144)
    make: Callable[..., str] = getattr(topics, "round_state" if kind == "round" else kind)
    return make(federation, *names)


def kinds() -> list[tuple[str, ...]]:
    """Every kind of topic with every combination of names."""
    names = (*USERS, ABSENT)
    return [(kind, *who) for kind, count in NAMED.items() for who in itertools.product(names, repeat=count)]


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Topic -> who must write it, who must read it."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for kind in kinds():
        for federation in (FEDERATION, TRIAL):
            found[topic(federation, *kind)] = writers(*kind) & {*USERS}, readers(*kind) & {*USERS}
        later = topic(FEDERATION, *kind).replace("/v1/", "/v2/")
        found[later] = set(), {*USERS} if kind == ("spec",) else set()  # a node can tell that it is too old
        found[topic(FOREIGN, *kind)] = set(), set()
    spec = topics.spec(FEDERATION)
    others = (
        topics.verdicts("line"), topics.ROOT, f"{topics.ROOT}/{FEDERATION}", f"{spec}/more", f"/{spec}", f"{spec}/",
        f"more/{spec}", spec.upper(), topics.down(FEDERATION, "plant-a") + "/more", f"{topics.ROOT}/{FEDERATION}/nodes",
        "anything", "$SYS/broker/version", "$SYS/anything", "$CONTROL/dynamic-security/v1",
    )  # fmt: skip
    return found | dict.fromkeys(others, (set(), set()))


TABLE = table()
CASES = len(TABLE) * len((*USERS, JOKER)) * 2


# The broker


class Guarded:
    """A mosquitto behind the access list, and a way in for everybody who has a certificate."""

    def __init__(self, port: int, authority: Authority):
        self._port, self._authority = port, authority
        self._certificates = {name: authority.issue(name) for name in (*USERS, JOKER, KING)}
        self._opened = itertools.count()

    def wire(self, name: str, **options: Any) -> Wire:
        """A connection that is to be opened; nobody (`""`) has no certificate."""
        cert, key = self._certificates.get(name, (None, None))
        endpoint = Endpoint.parse(f"mqtts://127.0.0.1:{self._port}", ca=self._authority.ca, cert=cert, key=key)
        return Wire(endpoint, f"client-{next(self._opened)}", MQTT5, 10, **options)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    authority = Authority(folder, "authority")
    certificate, key = authority.issue("broker")
    (folder / "acl").write_text(f"{access.acl(FEDERATION)}\nuser {KING}\ntopic readwrite #\ntopic readwrite $SYS/#\n")
    lines = (
        f"certfile {certificate}", f"keyfile {key}", f"cafile {authority.ca}", "require_certificate true",
        "use_identity_as_username true", f"acl_file {folder / 'acl'}",
    )  # fmt: skip
    with configured(folder / "broker", *lines) as port:
        yield Guarded(port, authority)


def heard(wire: Wire, payload: bytes) -> set[str]:
    """The topics on which this arrived."""
    return {each.topic for each in wire.arrivals if each.payload == payload}


# What is tried

FILTERS = {
    "each by its name": tuple(TABLE),
    "everything": ("#", "$SYS/#"),
    "every level": tuple("/".join("+" * levels) for levels in range(1, 11)),
    "a shared subscription": ("$share/{user}/#",),
}


def test_everybody_reads_what_they_must_and_nothing_else_however_they_subscribe(
    broker: Guarded, record_property: Callable[[str, object], None]
) -> None:
    record_property("cases", CASES)
    assert CASES > 3000
    end = topics.spec(FEDERATION)
    with ExitStack() as stack:
        king = stack.enter_context(broker.wire(KING))
        king.subscribe("#")
        for topic in TABLE:
            king.send(topic, b"kept", retain=True)
        king.publish(end, b"end")
        found = {}
        for user, (way, filters) in itertools.product((*USERS, JOKER), FILTERS.items()):
            found[user, way] = wire = stack.enter_context(broker.wire(user))
            wire.subscribe(*(each.format(user=user) for each in filters))
        for topic in TABLE:
            king.send(topic, b"live")
        assert not king.publish(end, b"end")
        assert king.find(lambda each: each.payload == b"end")
        assert heard(king, b"live") == {topic for topic in TABLE if not topic.startswith("$")}
        for (user, _), wire in found.items():
            must = {topic for topic, (_, readers) in TABLE.items() if user in readers}
            if user != JOKER:
                assert wire.find(lambda each: each.payload == b"end")
            wire.subscribe("done")
            assert heard(wire, b"live") == heard(wire, b"kept") == {each.topic for each in wire.arrivals} == must


@pytest.mark.parametrize("qos", [0, 1])
def test_everybody_writes_what_they_must_and_nothing_else(broker: Guarded, qos: int) -> None:
    with broker.wire(KING) as king:
        king.subscribe("#")
        for user in (*USERS, JOKER):
            mine = f"{user} {qos}".encode()
            with broker.wire(user) as wire:
                for topic in TABLE:
                    wire.send(topic, mine, qos=qos, retain=True)
                wire.publish("done", b"")
            king.publish("anything", mine + b" ends")
            assert king.find(lambda each, last=mine + b" ends": each.payload == last)  # type: ignore[misc]
            assert heard(king, mine) == {topic for topic, (writers, _) in TABLE.items() if user in writers}, user


def test_a_last_will_says_nothing_where_its_owner_may_not_write(broker: Guarded) -> None:
    generator = random.Random()
    with broker.wire(KING) as king:
        king.subscribe("#")
        for user in USERS:
            closed = [topic for topic, (writers, _) in TABLE.items() if user not in writers]
            tried = [*generator.sample(closed, 5), topics.presence(FEDERATION, user)]
            mine = f"will of {user}".encode()
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda topic: broker.wire(user, will=(topic, mine)).open().cut(), tried))  # noqa: B023
            broker.wire(KING, will=("anything", mine + b" ends")).open().cut()
            assert king.find(lambda each, last=mine + b" ends": each.payload == last)  # type: ignore[misc]
            assert heard(king, mine) == {topic for topic in tried if user in TABLE[topic][0]}, user


def test_whoever_has_no_certificate_does_not_get_in(broker: Guarded) -> None:
    with pytest.raises(LinkError):
        broker.wire("").open()
