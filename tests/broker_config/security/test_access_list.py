"""The broker's access list, tried: every topic, by everybody, in effect,
against a real mosquitto with certificates.
"""

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT5
from broker_config.protocol import topics
from broker_config.protocol.errors import BrokerError
from broker_config.protocol.federation_kinds import KINDS, NODE
from broker_config.protocol.topics import COORDINATOR, MONITOR, TRIAL
from broker_config.security import certificate_authority
from edge.doctor.probe import ProbeConnection
from tests.support.provisioned_federation import Guarded

FEDERATION, FOREIGN = "steel", "wood"
NODES = ("plant-a", "plant-b")
# has a certificate of the federation's authority: only the charter tells that it is no member
STRANGER = "mallory"
ABSENT = "plant-c"  # a name that nobody has
USERS = (COORDINATOR, *NODES, MONITOR, STRANGER)
JOKER = "+"  # a certificate with a wildcard for its name
KING = "king"  # of the test: may do everything, so that everything can be seen to arrive or not
DIGEST = "0" * 64
# Kinds of topics, and how many names they hold
NAMED = {
    "spec": 0,
    "round": 0,
    "status": 0,
    "presence": 1,
    "up": 1,
    "down": 1,
    "chunks": 1,
    "want": 2,
}
# those of further kinds of federation, as far as they are installed
KIND_TOPICS = {f"{name}/{each.path}": each for name, kind in KINDS.items() for each in kind.topics}
NAMED |= {path: path.count(NODE) for path in KIND_TOPICS}

# The specification: who must; everybody else must not


def writers(kind: str, *names: str) -> set[str]:
    match kind, names:
        case "spec" | "round" | "status", ():
            return {COORDINATOR}
        case "presence" | "up" | "chunks", (name,):
            return {name} - {MONITOR}
        case "down", _:
            return {COORDINATOR}
        # nodes ask the coordinator only
        case "want", (holder, asker) if COORDINATOR in (holder, asker):
            return {asker} - {MONITOR}
        case _ if kind in KIND_TOPICS:
            writer = KIND_TOPICS[kind].writer
            return {COORDINATOR} if writer == COORDINATOR else {*names} - {MONITOR}
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
        case _ if kind in KIND_TOPICS:
            allowed = KIND_TOPICS[kind].readers
            nodes = {*names} or {*USERS}
            found = nodes - {MONITOR} if "node" in allowed else set()
            return found | ({COORDINATOR, MONITOR} & {*allowed})
    return set()


# The topics: of the federation, of the doctor's, of another one, of another version, and others


def topic(federation: str, kind: str, *names: str) -> str:
    if kind == "chunks":
        return topics.chunks(federation, *names, DIGEST, 262_144)
    if kind in KIND_TOPICS:
        path = kind.replace(NODE, *names) if names else kind
        return f"{topics.ROOT}/{federation}/{path}"
    make: Callable[..., str] = getattr(topics, "round_state" if kind == "round" else kind)
    return make(federation, *names)


def kinds() -> list[tuple[str, ...]]:
    """Every kind of topic with every combination of names."""
    names = (*USERS, ABSENT)
    return [
        (kind, *who)
        for kind, count in NAMED.items()
        for who in itertools.product(names, repeat=count)
    ]


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Topic -> who must write it, who must read it."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for kind in kinds():
        for federation in (FEDERATION, TRIAL):
            found[topic(federation, *kind)] = writers(*kind) & {*USERS}, readers(*kind) & {*USERS}
        later = topic(FEDERATION, *kind).replace("/v1/", "/v2/")
        # a node can tell that it is too old
        found[later] = set(), {*USERS} if kind == ("spec",) else set()
        found[topic(FOREIGN, *kind)] = set(), set()
    spec = topics.spec(FEDERATION)
    others = (
        topics.verdicts("line"),
        topics.ROOT,
        f"{topics.ROOT}/{FEDERATION}",
        f"{spec}/more",
        f"/{spec}",
        f"{spec}/",
        f"more/{spec}",
        spec.upper(),
        topics.down(FEDERATION, "plant-a") + "/more",
        f"{topics.ROOT}/{FEDERATION}/nodes",
        "anything",
        "$SYS/broker/version",
        "$SYS/anything",
        "$CONTROL/dynamic-security/v1",
    )
    return found | dict.fromkeys(others, (set(), set()))


TABLE = table()
CASES = len(TABLE) * len((*USERS, JOKER)) * 2


# The broker


class Doors:
    """The ways into a broker, for everybody who has a certificate of its federation's authority."""

    def __init__(self, broker: Guarded):
        self._kit, registry = broker.kits["plant-a"], broker.members.registry
        now = datetime.now(UTC)
        self._pairs = {
            name: certificate_authority.issue_member(
                registry.ca, FEDERATION, name, now, now + timedelta(days=1)
            )
            for name in (*USERS, JOKER, KING)
        }
        self._url, self._ca = broker.url, broker.folder / "broker" / "ca.pem"
        self._opened = itertools.count()

    def connection(self, name: str, **options: Any) -> ProbeConnection:
        """A connection that is to be opened; nobody (`""`) has no certificate."""
        endpoint = Endpoint.parse(self._url, ca=self._ca)
        if name:
            pair = self._pairs[name]
            own = msgspec.structs.replace(
                self._kit, name=name, certificate=pair.certificate, key=pair.key
            )
            endpoint = Endpoint.from_kit(own, with_signer=False)
        return ProbeConnection(endpoint, f"client-{next(self._opened)}", MQTT5, 10, **options)


@pytest.fixture(scope="module")
def doors(provisioned: Guarded) -> Doors:
    """The broker with its configuration as `provision` writes it, and a line for the king."""
    with (provisioned.folder / "broker" / "acl").open("a") as acl:
        acl.write(f"\nuser {KING}\ntopic readwrite #\n")
    provisioned.reload()
    return Doors(provisioned)


def heard(connection: ProbeConnection, payload: bytes) -> set[str]:
    """The topics on which this arrived."""
    return {each.topic for each in connection.received if each.payload == payload}


# What is tried

FILTERS = {
    "each by its name": tuple(TABLE),
    "everything": ("#", "$SYS/#"),
    "every level": tuple("/".join("+" * levels) for levels in range(1, 11)),
    "a shared subscription": ("$share/{user}/#",),
}


def test_everybody_reads_what_they_must_and_nothing_else_however_they_subscribe(
    doors: Doors, record_property: Callable[[str, object], None]
) -> None:
    record_property("cases", CASES)
    assert CASES > 3000
    end = topics.spec(FEDERATION)
    with ExitStack() as stack:
        king = stack.enter_context(doors.connection(KING))
        king.subscribe("#")
        for topic in TABLE:
            king.send(topic, b"kept", retain=True)
        king.publish(end, b"begin")
        found = {}
        for user, (way, filters) in itertools.product((*USERS, JOKER), FILTERS.items()):
            found[user, way] = connection = stack.enter_context(doors.connection(user))
            connection.subscribe(*(each.format(user=user) for each in filters))
        for topic in TABLE:
            king.send(topic, b"live")
        assert not king.publish(end, b"end")
        assert king.wait_for(lambda each: each.payload == b"end")
        assert heard(king, b"live") == {topic for topic in TABLE if not topic.startswith("$")}
        for (user, _), connection in found.items():
            must = {topic for topic, (_, readers) in TABLE.items() if user in readers}
            if user != JOKER:
                assert connection.wait_for(lambda each: each.payload == b"end")
            connection.subscribe("done")
            assert (
                heard(connection, b"live")
                == heard(connection, b"kept")
                == {each.topic for each in connection.received}
                == must
            )


@pytest.mark.parametrize("qos", [0, 1])
def test_everybody_writes_what_they_must_and_nothing_else(doors: Doors, qos: int) -> None:
    with doors.connection(KING) as king:
        king.subscribe("#")
        for user in (*USERS, JOKER):
            mine = f"{user} {qos}".encode()
            with doors.connection(user) as connection:
                for topic in TABLE:
                    connection.send(topic, mine, qos=qos, retain=True)
                connection.publish("done", b"")
            king.publish("anything", mine + b" ends")
            assert king.wait_for(lambda each, last=mine + b" ends": each.payload == last)  # type: ignore[misc]
            assert heard(king, mine) == {
                topic for topic, (writers, _) in TABLE.items() if user in writers
            }, user


def test_a_last_will_says_nothing_where_its_owner_may_not_write(doors: Doors) -> None:
    generator = random.Random()
    tried = {(user, topics.presence(FEDERATION, user)) for user in USERS} | {
        (user, topic) for user in USERS for topic in generator.sample(sorted(TABLE), 5)
    }

    def die(user: str, topic: str) -> None:
        doors.connection(user, will=(topic, f"will of {user}".encode())).open().abort()

    with doors.connection(KING) as king:
        king.subscribe("#")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: die(*each), tried))
        die(KING, "anything")
        assert king.wait_for(lambda each: each.payload == b"will of king")
        said = {
            (user, topic) for user in USERS for topic in heard(king, f"will of {user}".encode())
        }
    assert said == {(user, topic) for user, topic in tried if user in TABLE[topic][0]}


def test_whoever_has_no_certificate_does_not_get_in(doors: Doors) -> None:
    with pytest.raises(BrokerError):
        doors.connection("").open()
