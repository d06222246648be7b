"""Whom a real mosquitto admits with the configuration that `edge-node provision` has written,
as it is.
"""

import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest

from broker_config.mqtt.client import Delivery, Disconnected, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import MAX_MESSAGE
from broker_config.protocol.errors import BrokerError, EdgeNodeError, UsageError
from broker_config.security import certificate_authority
from broker_config.security.certificate_authority import KeyPair
from tests.support.provisioned_federation import Guarded, admitted, connect, make

DAY = timedelta(days=1)
NOW = datetime.now(UTC)


def with_files(broker: Guarded, pair: KeyPair | None, folder: Path) -> Endpoint:
    """The broker for whoever shows this certificate."""
    (folder / "ca.pem").write_text(broker.members.registry.ca.certificate)
    if pair is None:
        return Endpoint.parse(broker.url, ca=folder / "ca.pem")
    (folder / "cert.pem").write_text(pair.certificate)
    (folder / "key.pem").write_text(pair.key)
    return Endpoint.parse(
        broker.url, ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem"
    )


@pytest.mark.parametrize("name", ["coordinator", "monitor", "plant-a", "plant-b"])
def test_the_broker_admits_every_member_with_its_kit(name: str, provisioned: Guarded) -> None:
    assert admitted(provisioned.kits[name])


def issued(broker: Guarded, ends: timedelta, by: KeyPair | None = None) -> KeyPair:
    return certificate_authority.issue_member(
        by or broker.members.registry.ca, "steel", "plant-a", NOW, NOW + ends
    )


STRANGERS: dict[str, tuple[Callable[[Guarded], KeyPair | None], str]] = {
    "nobody": (lambda broker: None, "does not accept our certificate: there is none"),
    "who has expired": (
        lambda broker: issued(broker, -DAY / 24),
        "does not accept our certificate: it has expired",
    ),
    "another federation": (
        lambda broker: issued(broker, DAY, certificate_authority.create_authority("iron", NOW)),
        "does not accept our certificate: another authority has issued it",
    ),
    "another authority of the same name": (
        lambda broker: issued(broker, DAY, certificate_authority.create_authority("steel", NOW)),
        "does not accept our certificate",
    ),
    "the broker itself": (
        lambda broker: broker.members.registry.broker,
        "does not accept our certificate: it is not one of a client",
    ),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_the_broker_does_not_admit(who: str, provisioned: Guarded, tmp_path: Path) -> None:
    pair, words = STRANGERS[who]
    with pytest.raises(BrokerError, match=words) as caught:
        connect(with_files(provisioned, pair(provisioned), tmp_path))
    assert caught.value.remedy


def test_nobody_speaks_to_the_broker_in_the_clear(provisioned: Guarded) -> None:
    port = provisioned.members.registry.port
    with pytest.raises(BrokerError, match="closed") as caught:
        connect(Endpoint.parse(f"mqtt://127.0.0.1:{port}"))
    assert "scheme" in caught.value.remedy


@pytest.mark.parametrize(
    ("version", "accepted"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)]
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1")
def test_the_broker_speaks_tls_from_1_2_on(
    version: str, accepted: bool, provisioned: Guarded
) -> None:
    context = provisioned.kits["plant-a"].tls_context()
    context.set_ciphers("ALL:@SECLEVEL=0")  # else our own side would refuse
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    port = provisioned.members.registry.port
    with socket.create_connection(("127.0.0.1", port)) as plain:
        if accepted:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                assert secure.version() == version.replace("_", ".")
        else:
            with pytest.raises(ssl.SSLError, match="alert protocol version"):
                context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_we_do_not_accept_a_broker_at_another_host_or_of_another_federation(
    provisioned: Guarded, tmp_path: Path
) -> None:
    its, port = provisioned.kits["plant-a"], provisioned.members.registry.port
    with pytest.raises(BrokerError, match="Hostname mismatch") as caught:
        admitted(msgspec.structs.replace(its, broker=f"mqtts://localhost:{port}"))
    assert "host name" in caught.value.remedy
    with pytest.raises(BrokerError, match="not trusted") as caught:
        admitted(
            msgspec.structs.replace(
                make(tmp_path / "other").kits["plant-a"], broker=provisioned.url
            )
        )
    assert "kit's federation" in caught.value.remedy


def test_an_expired_kit_says_so_before_it_connects(provisioned: Guarded) -> None:
    pair = issued(provisioned, -DAY)
    old = msgspec.structs.replace(
        provisioned.kits["plant-a"], certificate=pair.certificate, key=pair.key
    )
    with pytest.raises(UsageError, match=r"plant-a.*expired") as caught:
        admitted(old)
    assert "edge-node provision --renew" in caught.value.remedy


def test_the_largest_message_and_a_usual_chunk_fit_and_what_is_larger_does_not(
    provisioned: Guarded,
) -> None:
    coordinator, _ = connect(Endpoint.from_kit(provisioned.kits["coordinator"]))
    node, inbox = connect(Endpoint.from_kit(provisioned.kits["plant-a"]))
    topic = topics.chunks("steel", "coordinator", "0" * 64, 262_144)
    with closing(coordinator), closing(node):
        node.max_payload = 1 << 20
        node.subscribe(topics.down("steel", "plant-a"), topic)
        settle(node, inbox, topics.presence("steel", "plant-a"))
        for where, size in (
            (topics.down("steel", "plant-a"), MAX_MESSAGE),
            (topic, 262_144 + 1024),
        ):
            coordinator.publish(where, bytes(size))
            received = inbox.get(timeout=60)
            assert (received.topic, len(received.payload)) == (where, size)
        with pytest.raises(EdgeNodeError, match="exceeds the 1048576"):
            coordinator.publish(topic, bytes(1 << 20))


def test_what_was_said_to_a_member_that_is_away_outlives_a_restart_of_the_broker(
    provisioned: Guarded,
) -> None:
    node, inbox = connect(Endpoint.from_kit(provisioned.kits["plant-a"]), "edge-node/steel/plant-a")
    node.subscribe(topics.down("steel", "plant-a"))
    settle(node, inbox, topics.presence("steel", "plant-a"))
    node.close()
    coordinator, _ = connect(Endpoint.from_kit(provisioned.kits["coordinator"]))
    with closing(coordinator):
        for number in range(2000):
            coordinator.publish(topics.down("steel", "plant-a"), str(number).encode())
            if number % 500 == 499:
                assert coordinator.flush(60)
    provisioned.restart()
    endpoint = Endpoint.from_kit(provisioned.kits["plant-a"])
    node, inbox = connect(endpoint, "edge-node/steel/plant-a", topics.down("steel", "plant-a"))
    with closing(node):
        for number in range(2000):
            received = inbox.get(timeout=60)
            assert received.payload == str(number).encode()
            node.ack(received)


def settle(mqtt: MqttClient, inbox: "Queue[Any]", topic: str) -> None:
    """Return once all that was subscribed to before is in force:
    what we say ourselves comes back.
    """
    mqtt.subscribe(topic)
    mqtt.publish(topic, b'"here"')
    while not (isinstance(got := inbox.get(timeout=60), Delivery) and got.topic == topic):
        pass
    mqtt.ack(got)


def test_who_knew_a_client_id_could_take_its_session_so_members_cannot_guess_it(
    provisioned: Guarded,
) -> None:
    """mosquitto 2.0.11 does not bind client ids to user names,
    and two connections of one member need two.
    """
    its, other = (Endpoint.from_kit(provisioned.kits[name]) for name in ("plant-a", "plant-b"))
    name = "edge-node/steel/one"
    victim, inbox = connect(its, name)
    guess, heard = connect(other, name)
    with closing(victim), closing(guess):
        settle(guess, heard, topics.presence("steel", "plant-b"))
        assert (inbox.qsize(), victim.is_connected) == (0, True)
        thief = MqttClient(other, "thief", inbox=Queue(), persistent=True)
        thief._client_id = victim._client_id  # which only the victim's kit derives
        thief.open()
        try:
            assert isinstance(inbox.get(timeout=60), Disconnected)
        finally:
            thief.close()


def test_a_member_that_asks_for_qos_2_is_disconnected(provisioned: Guarded) -> None:
    mqtt, inbox = connect(Endpoint.from_kit(provisioned.kits["plant-a"]))
    with closing(mqtt):
        mqtt.publish(topics.up("steel", "plant-a"), b"", qos=2)
        assert inbox.get(timeout=60) == Disconnected(mqtt, "QoS not supported")


def test_a_member_that_fills_the_brokers_memory_is_disconnected_and_the_others_are_not(
    provisioned: Guarded,
) -> None:
    """With a limit that is reached sooner.

    What it piled up goes with the broker's data, which can be spared.
    """
    conf = provisioned.folder / "broker" / "mosquitto.conf"
    whole = conf.read_text()
    conf.write_text(whole.replace("memory_limit 1073741824", "memory_limit 20000000"))
    provisioned.restart()
    coordinator, others = connect(Endpoint.from_kit(provisioned.kits["coordinator"]))
    flood, inbox = connect(Endpoint.from_kit(provisioned.kits["plant-a"]))
    with closing(coordinator), closing(flood):
        for number in range(40):
            topic = topics.chunks("steel", "plant-a", f"{number:064x}", 1 << 20)
            flood.publish(topic, bytes(1_000_000), qos=0, retain=True)
        assert isinstance(inbox.get(timeout=60), Disconnected)
        coordinator.publish(topics.down("steel", "plant-b"), b"go on")
        assert coordinator.flush(60)
        assert others.empty()
    provisioned.stop()
    (provisioned.folder / "broker" / "data" / "mosquitto.db").unlink()
    conf.write_text(whole)
    provisioned.start()
    assert admitted(provisioned.kits["plant-a"])


def heard_by_the_coordinator(broker: Guarded, mqtt: MqttClient) -> bool:
    """Whether what plant-b publishes reaches the coordinator."""
    coordinator, inbox = connect(Endpoint.from_kit(broker.kits["coordinator"]))
    with closing(coordinator):
        coordinator.subscribe(topics.up("steel", "plant-b"))
        ours = topics.presence("steel", "coordinator")
        settle(coordinator, inbox, ours)
        mqtt.publish(topics.up("steel", "plant-b"), b"here")
        assert mqtt.flush(60)  # the broker has passed it on by now, or dropped it
        coordinator.publish(ours, b'"end"')
        arrived = [inbox.get(timeout=60)]
        while arrived[-1].topic != ours:
            arrived.append(inbox.get(timeout=60))
        return b"here" in [each.payload for each in arrived]


def test_a_revoked_node_stays_out_once_the_broker_has_read_the_list_and_is_put_out_by_a_restart(
    provisioned: Guarded,
) -> None:
    """Last, since it changes the federation."""
    logged: Queue[logging.LogRecord] = Queue()
    logging.getLogger("broker_config.mqtt.client").addHandler(handler := QueueHandler(logged))
    its = provisioned.kits["plant-b"]
    mqtt, inbox = connect(Endpoint.from_kit(its))
    assert heard_by_the_coordinator(provisioned, mqtt)
    for name in ("plant-a", "plant-b"):  # two lists, in one second: the later one counts
        provisioned.members = provisioned.members.change(revoke=[name])
        provisioned.reload()
    with pytest.raises(BrokerError, match="revoked") as caught:
        admitted(its)
    assert "new kit" in caught.value.remedy
    assert admitted(provisioned.kits["coordinator"])
    assert (mqtt.is_connected, inbox.qsize()) == (True, 0)
    assert not heard_by_the_coordinator(provisioned, mqtt), (
        "it is still connected, but may say nothing"
    )
    provisioned.restart()
    assert isinstance(inbox.get(timeout=60), Disconnected)
    with pytest.raises(BrokerError, match="revoked"):
        admitted(its)
    assert "Not authorized" in logged.get(timeout=60).message
    assert "revoked" in logged.get(timeout=60).message
    mqtt.close()
    logging.getLogger("broker_config.mqtt.client").removeHandler(handler)
