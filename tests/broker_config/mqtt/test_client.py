"""One connection to a broker: how it comes about, why it does not, and what it survives."""

import contextlib
import gc
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt import handshake
from broker_config.mqtt.client import (
    Claim,
    Connected,
    Delivery,
    Disconnected,
    Endpoint,
    MqttClient,
    is_name_taken,
    read_retained,
)
from broker_config.protocol.errors import BrokerError, EdgeNodeError
from tests.support.certificates import Authority
from tests.support.proxy import Proxy
from tests.support.secured_mosquitto import Secured
from tests.support.unreliable_network import UnreliableProxy
from tests.support.waiting import PATIENCE, wait_until

Inbox = queue.Queue[Any]


def client_to(
    url: str, name: str = "me", *, persistent: bool = False, inbox: Inbox | None = None, **more: Any
) -> MqttClient:
    return MqttClient(
        Endpoint.parse(url), name, inbox=inbox or queue.Queue(), persistent=persistent, **more
    )


def expect(inbox: Inbox, kind: type = Delivery) -> Any:
    """The next event of a kind."""
    while not isinstance(event := inbox.get(timeout=60), kind):
        pass
    return event


# Connecting


def test_the_newest_version_that_the_broker_speaks_is_spoken(broker: EmbeddedBroker) -> None:
    with client_to(broker.url, persistent=True) as mqtt:
        assert mqtt.is_connected
        assert (mqtt.version, mqtt.max_packet) == {
            "mosquitto": (5, 268_435_455),
            "amqtt": (4, None),
        }[broker.kind]


def test_credentials_do_not_confuse_an_old_broker(tmp_path: Path) -> None:
    with start_broker(tmp_path, kind="amqtt") as broker:
        url = broker.url.replace("mqtt://", "mqtt://anna:secret@")
        client_to(url, persistent=True, claim=Claim.draw("me")).open(timeout=60).close()


def test_a_port_without_broker_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(BrokerError, match=rf"nothing listens.*:{port}"):
        client_to(f"mqtt://127.0.0.1:{port}").open()


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(BrokerError, match=r"nowhere\.invalid.*unknown"):
        client_to("mqtt://nowhere.invalid").open()


def test_a_silent_server_is_not_waited_for_longer_than_asked() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(BrokerError, match=r"no answer.*0\.3 s"),
    ):
        client_to(f"mqtt://127.0.0.1:{server.getsockname()[1]}").open(timeout=0.3)


def test_a_server_that_hangs_up_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        hang_up = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        hang_up.start()
        with pytest.raises(
            BrokerError,
            match=r"(?s)closed.*scheme",
        ):
            client_to(f"mqtt://127.0.0.1:{server.getsockname()[1]}").open(timeout=60)
        hang_up.join()


def test_a_server_that_does_not_speak_tls_is_explained() -> None:
    def answer(server: socket.socket) -> None:
        connection = server.accept()[0]
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            # closed with something unread, it would be reset, and the answer lost
            while connection.recv(1000):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=answer, args=(server,))
        answering.start()
        with pytest.raises(BrokerError, match="TLS"):
            client_to(f"mqtts://127.0.0.1:{server.getsockname()[1]}").open(timeout=60)
        answering.join()


@pytest.mark.parametrize("user", ["", "anna@", "anna:wrong@"])
def test_a_broker_that_does_not_admit_us_is_explained(secured: Secured, user: str) -> None:
    with pytest.raises(BrokerError, match="EDGE_NODE_PASSWORD") as caught:
        client_to(f"mqtt://{user}127.0.0.1:{secured.closed}").open()
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["tls", "wss"])
def test_messages_travel_encrypted(secured: Secured, scheme: str) -> None:
    url = f"{'wss' if scheme == 'wss' else 'mqtts'}://127.0.0.1:{getattr(secured, scheme)}"
    inbox: Inbox = queue.Queue()
    payload = os.urandom(3000)
    with MqttClient(
        Endpoint.parse(url, ca=secured.authority.ca), "me", inbox=inbox, persistent=False
    ) as mqtt:
        assert mqtt.version == 5
        mqtt.subscribe("topic")
        mqtt.publish("topic", payload)
        assert expect(inbox).payload == payload


@pytest.mark.parametrize("scheme", ["tls", "wss"])
def test_a_broker_of_another_authority_is_not_trusted(
    secured: Secured, scheme: str, tmp_path: Path
) -> None:
    url = f"{'wss' if scheme == 'wss' else 'mqtts'}://127.0.0.1:{getattr(secured, scheme)}"
    for ca in (Authority(tmp_path, "stranger").ca, None):
        with pytest.raises(BrokerError, match=r"(?s)127\.0\.0\.1:\d+.*not trusted.*--ca"):
            MqttClient(
                Endpoint.parse(url, ca=ca), "me", inbox=queue.Queue(), persistent=False
            ).open()


def test_a_broker_under_another_name_is_not_trusted(secured: Secured) -> None:
    endpoint = Endpoint.parse(f"mqtts://localhost:{secured.tls}", ca=secured.authority.ca)
    with pytest.raises(
        BrokerError,
        match=r"(?s)not trusted.*localhost.*host name",
    ):
        MqttClient(endpoint, "me", inbox=queue.Queue(), persistent=False).open()


def test_a_client_shows_its_certificate_where_one_is_demanded(secured: Secured) -> None:
    certificate, key = secured.authority.issue("node")
    url = f"mqtts://127.0.0.1:{secured.mutual}"
    endpoint = Endpoint.parse(url, ca=secured.authority.ca, cert=certificate, key=key)
    MqttClient(endpoint, "me", inbox=queue.Queue(), persistent=False).open().close()
    with pytest.raises(BrokerError, match="--cert, --key"):
        MqttClient(
            Endpoint.parse(url, ca=secured.authority.ca),
            "me",
            inbox=queue.Queue(),
            persistent=False,
        ).open()


@pytest.mark.parametrize(
    ("scheme", "listener", "complaint"),
    [
        ("mqtt", "tls", "scheme and port belong together"),
        ("mqtts", "closed", "scheme and port belong together"),
        ("ws", "closed", "no WebSocket"),
    ],
)
def test_a_scheme_that_is_not_the_port_s_is_explained(
    secured: Secured, scheme: str, listener: str, complaint: str
) -> None:
    with pytest.raises(BrokerError, match=complaint):
        client_to(f"{scheme}://127.0.0.1:{getattr(secured, listener)}").open(timeout=60)


def test_a_websocket_loses_nothing_when_it_writes_in_parts(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(_client: object, _data: object, sock: Any) -> None:
        with socket.socket(fileno=os.dup(sock.fileno())) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)

    # nobody else wants a socket with little room
    monkeypatch.setattr(handshake, "_send_at_once", shrink)
    inbox: Inbox = queue.Queue()
    reader = Endpoint.parse(f"mqtts://127.0.0.1:{secured.tls}", ca=secured.authority.ca)
    with (
        MqttClient(reader, "reader", inbox=inbox, persistent=False) as receiving,
        client_to(f"ws://127.0.0.1:{secured.ws}", "writer") as mqtt,
    ):
        receiving.subscribe("topic")
        receiving.publish("ready", b"")
        assert receiving.flush(60)
        for number in range(8):
            mqtt.publish("topic", bytes([number]) * (200_000 if number % 2 else 100), qos=0)
        assert [expect(inbox).payload[0] for _ in range(8)] == list(range(8))


# Messages


def test_a_message_arrives_with_all_that_is_known_of_it(broker: EmbeddedBroker) -> None:
    inbox: Inbox = queue.Queue()
    with client_to(broker.url, inbox=inbox) as mqtt:
        assert inbox.get(timeout=60) == Connected(mqtt)
        mqtt.subscribe("a/+", "b/#")
        mqtt.publish("a/1", b"one")
        assert mqtt.flush(60)
        assert expect(inbox)[:4] == (mqtt, "a/1", b"one", False)
        mqtt.unsubscribe("a/+")
        mqtt.publish("a/1", b"two")
        mqtt.publish("b/1/2", b"three", qos=0)
        assert expect(inbox).payload == b"three"


def test_retained_messages_are_found_by_a_probe_that_does_not_wait_in_vain(
    broker: EmbeddedBroker,
) -> None:
    with client_to(broker.url) as mqtt:
        mqtt.subscribe("fed/+/nodes")  # amqtt sends newcomers what others subscribed to
        mqtt.publish("fed/a/spec", b"A", retain=True)
        mqtt.publish("fed/b/spec", b"B", retain=True)
        mqtt.publish("fed/b/nodes", b"C", retain=True)
        mqtt.publish("fed/c/spec", b"not retained")
        assert mqtt.flush(60)
        ever = 1000.0  # seconds: longer than a test may take
        assert read_retained(Endpoint.parse(broker.url), ["fed/+/spec"], wait=ever) == {
            "fed/a/spec": b"A",
            "fed/b/spec": b"B",
        }
        assert read_retained(Endpoint.parse(broker.url), ["other/#"], wait=ever) == {}


def test_a_message_beyond_the_broker_s_limit_is_refused_before_it_breaks_the_connection(
    tmp_path: Path,
) -> None:
    inbox: Inbox = queue.Queue()
    with (
        start_broker(tmp_path, kind="mosquitto", max_packet=131_072) as broker,
        client_to(broker.url, inbox=inbox) as mqtt,
    ):
        mqtt.subscribe("topic")
        with pytest.raises(EdgeNodeError, match="131072"):
            mqtt.publish("topic", bytes(131_072))
        mqtt.publish("topic", bytes(131_000))
        expect(inbox)


@pytest.mark.parametrize("qos", [0, 1])
def test_a_payload_that_is_too_long_arrives_cut_and_what_follows_arrives_whole(
    broker: EmbeddedBroker, qos: int
) -> None:
    inbox: Inbox = queue.Queue()
    with client_to(broker.url, inbox=inbox) as mqtt:
        mqtt.subscribe("topic")
        for length in (3_000_000, mqtt.max_payload + 1, mqtt.max_payload, 5):
            mqtt.publish("topic", bytes(length), qos=qos)
        assert [len(expect(inbox).payload) - mqtt.max_payload for _ in range(3)] == [1, 1, 0]
        assert expect(inbox).payload == bytes(5)


def test_small_messages_are_not_held_back(mosquitto: EmbeddedBroker) -> None:
    inbox: Inbox = queue.Queue()
    with client_to(mosquitto.url, inbox=inbox) as mqtt:
        mqtt.subscribe("topic")
        # else each pair takes 40 ms
        assert mqtt._paho.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        mqtt.publish("topic", b"first")
        mqtt.publish("topic", b"second")
        assert [expect(inbox).payload for _ in range(2)] == [b"first", b"second"]


class WatchedInbox(queue.Queue[Any]):
    """An inbox that notes when a message may have to wait for room."""

    def __init__(self, maxsize: int):
        super().__init__(maxsize)
        self.waited_for = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if block and isinstance(item, Delivery):
            self.waited_for.set()
        super().put(item, block, timeout)


def test_a_full_inbox_drops_qos_0_and_holds_qos_1_back(mosquitto: EmbeddedBroker) -> None:
    inbox = WatchedInbox(maxsize=3)
    with (
        client_to(mosquitto.url, "sender") as sender,
        client_to(mosquitto.url, "receiver", inbox=inbox) as receiver,
    ):
        receiver.subscribe("loose", qos=0)
        receiver.subscribe("firm", qos=1)
        receiver.publish("ready", b"")
        assert receiver.flush(60)
        for number in range(20):
            sender.publish("loose", str(number).encode(), qos=0)
        for number in range(20):
            sender.publish("firm", str(number).encode())
        assert inbox.waited_for.wait(60)
        arrived = [expect(inbox) for _ in range(22)]
        assert [int(each.payload) for each in arrived if each.topic == "loose"] == [0, 1]
        assert [int(each.payload) for each in arrived if each.topic == "firm"] == list(range(20))


def test_what_is_published_at_qos_0_leaves_at_once_even_while_the_link_waits_for_its_inbox(
    mosquitto: EmbeddedBroker,
) -> None:
    heard, full = Inbox(), Inbox(1)
    with (
        client_to(mosquitto.url, "other", inbox=heard) as other,
        client_to(mosquitto.url, inbox=full) as mqtt,
    ):
        expect(heard, Connected)
        other.subscribe("out", qos=0)
        assert other.await_subscription(60)
        mqtt.subscribe("in")
        assert mqtt.await_subscription(60)
        for number in range(3):
            other.publish("in", b"%d" % number)
        assert other.flush(60)
        for number in range(50):
            mqtt.publish("out", b"%d" % number, qos=0)
        assert [expect(heard).payload for _ in range(50)] == [
            b"%d" % number for number in range(50)
        ]


def test_a_link_closes_even_when_nobody_empties_its_inbox(mosquitto: EmbeddedBroker) -> None:
    inbox = WatchedInbox(maxsize=1)
    mqtt = client_to(mosquitto.url, inbox=inbox).open()
    mqtt.subscribe("topic")
    mqtt.publish("topic", b"will wait")
    assert inbox.waited_for.wait(PATIENCE)  # paho's thread waits for room
    mqtt.close()
    wait_until(mqtt._disconnected.is_set)


# Connections that break


def test_a_broken_connection_is_told_and_mended_with_its_subscriptions(
    mosquitto: EmbeddedBroker,
) -> None:
    inbox: Inbox = queue.Queue()
    with Proxy(mosquitto.port) as proxy, client_to(proxy.url, inbox=inbox) as mqtt:
        mqtt.subscribe("topic")
        expect(inbox, Connected)
        proxy.cut()
        down = expect(inbox, Disconnected)
        assert down == Disconnected(mqtt, "connection lost")
        expect(inbox, Connected)
        mqtt.publish("topic", b"after")
        assert expect(inbox).payload == b"after"


def test_what_is_published_without_connection_arrives_later_and_in_order(
    mosquitto: EmbeddedBroker,
) -> None:
    inbox: Inbox = queue.Queue()
    with (
        Proxy(mosquitto.port) as proxy,
        client_to(mosquitto.url, "receiver", inbox=inbox) as receiver,
    ):
        receiver.subscribe("topic")
        ours: Inbox = queue.Queue()
        with client_to(proxy.url, "sender", inbox=ours) as sender:
            proxy.refuses = True
            proxy.cut()
            expect(ours, Disconnected)
            sender.publish("topic", b"lost", qos=0)
            for number in range(100):
                sender.publish("topic", str(number).encode())
            assert not sender.flush(0.01)
            proxy.refuses = False
            assert sender.flush(60)
        assert [int(expect(inbox).payload) for _ in range(100)] == list(range(100))


def test_too_many_messages_for_a_broker_that_is_away_are_an_error() -> None:
    mqtt = client_to("mqtt://127.0.0.1")
    with pytest.raises(BrokerError, match="messages wait"):  # noqa: PT012
        for _ in range(2000):
            mqtt.publish("topic", b"")


def test_the_backlog_is_what_is_published_and_not_yet_written(mosquitto: EmbeddedBroker) -> None:
    with Proxy(mosquitto.port, rate=50e6) as proxy, client_to(proxy.url) as mqtt:
        assert mqtt.backlog == 0
        proxy.flows.clear()
        for _ in range(100):
            mqtt.publish("topic", bytes(250_000), qos=0)
        assert 5_000_000 < mqtt.backlog < 25_100_000  # sockets hold the rest
        proxy.flows.set()
        wait_until(lambda: not mqtt.backlog)
        for _ in range(100):
            mqtt.publish("topic", bytes(250_000), qos=0)
        proxy.cut()
        wait_until(lambda: not mqtt.backlog)  # lost


def test_what_nobody_has_subscribed_to_is_not_heard(mosquitto: EmbeddedBroker) -> None:
    inbox: Inbox = queue.Queue()
    with UnreliableProxy(mosquitto.port) as proxy, client_to(proxy.url, inbox=inbox) as mqtt:
        mqtt.subscribe("a/+", "b/#")
        expect(inbox, Connected)
        for topic in ("", "a", "a/b/c", "+/+", "c", "b/is/asked/for"):
            proxy.say(topic, b"said by the broker")
        assert expect(inbox).topic == "b/is/asked/for"


def test_a_session_keeps_what_comes_while_its_owner_is_away(broker: EmbeddedBroker) -> None:
    inbox: Inbox = queue.Queue()
    with client_to(broker.url, "owner", persistent=True) as owner:
        owner.subscribe("topic")
        owner.publish("other", b"")
        assert owner.flush(60)
    with client_to(broker.url, "sender") as sender:
        sender.publish("topic", b"while away")
        assert sender.flush(60)
    owner = client_to(broker.url, "owner", persistent=True, inbox=inbox)
    owner.subscribe("topic")  # before it opens: what waits for it comes at once
    with owner:
        assert expect(inbox).payload == b"while away"


def test_what_is_not_acknowledged_comes_again_after_a_restart(mosquitto: EmbeddedBroker) -> None:
    inbox: Inbox = queue.Queue()
    for expected, acknowledge in [(b"1", False), (b"1", True), (b"2", True)]:
        owner = client_to(mosquitto.url, "owner", persistent=True, inbox=inbox)
        owner.subscribe("topic")
        with owner:
            if not acknowledge:
                owner.publish("topic", b"1")
                owner.publish("topic", b"2")
            delivery = expect(inbox)
            assert delivery.payload == expected
            if acknowledge:
                owner.ack(delivery)
            owner.publish("other", b"")
            assert owner.flush(60)
        inbox = queue.Queue()


def test_an_acknowledgement_of_an_earlier_connection_does_no_harm(
    mosquitto: EmbeddedBroker,
) -> None:
    inbox: Inbox = queue.Queue()
    with Proxy(mosquitto.port) as proxy, client_to(proxy.url, persistent=True, inbox=inbox) as mqtt:
        mqtt.subscribe("topic")
        mqtt.publish("topic", b"precious")
        early = expect(inbox)
        # the broker has said that it has it: else it would be published twice
        assert mqtt.flush(60)
        proxy.cut()
        again = expect(inbox)
        assert again.payload == b"precious"
        mqtt.ack(early)  # the same packet identifier, but of a connection that is no more
        mqtt.publish("other", b"")
        assert mqtt.flush(60)
        proxy.cut()
        last = expect(inbox)
        assert last.payload == b"precious"
        mqtt.ack(last)
        mqtt.publish("topic", b"next")
        assert expect(inbox).payload == b"next"


DOOMED = """
import queue, sys, time
from broker_config.mqtt.client import Claim, Endpoint, MqttClient
endpoint = Endpoint.parse(sys.argv[1])
MqttClient(endpoint, "doomed", inbox=queue.Queue(), persistent=True, claim=Claim("presence", \
16 * "a")).open()
print("up", flush=True)
time.sleep(60)
"""


def test_the_will_of_a_killed_process_is_sent_and_retained(broker: EmbeddedBroker) -> None:
    inbox: Inbox = queue.Queue()
    with client_to(broker.url, "observer", inbox=inbox) as observer:
        observer.subscribe("presence")
        doomed = subprocess.Popen(
            [sys.executable, "-c", DOOMED, broker.url], stdout=subprocess.PIPE
        )
        assert doomed.stdout
        assert doomed.stdout.readline() == b"up\n"
        doomed.kill()
        doomed.wait()
        gone = Claim("presence", 16 * "a").encode(online=False)
        assert expect(inbox).payload == gone
    assert read_retained(Endpoint.parse(broker.url), ["presence"], wait=60) == {"presence": gone}


def test_a_clean_close_sends_no_will(broker: EmbeddedBroker) -> None:
    inbox: Inbox = queue.Queue()
    with client_to(broker.url, "observer", inbox=inbox) as observer:
        observer.subscribe("presence")
        assert observer.await_subscription(60)
        with client_to(broker.url, "leaver", claim=Claim.draw("presence")) as leaver:
            leaver.publish("presence", b"leaving")
            assert leaver.flush(60)
        assert expect(inbox).payload == b"leaving"
        observer.publish("presence", b"later")
        assert expect(inbox).payload == b"later"


def _sockets() -> int:
    found = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by another thread
            found += str(link.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize("use", ["a connection", "a question for a name", "a refusal"])
def test_no_socket_waits_for_the_garbage_collector(
    use: str, secured: Secured, mosquitto: EmbeddedBroker
) -> None:
    """A process of hundreds of megabytes collects so seldom that it would run out of file
    descriptors.
    """

    def connect() -> None:
        if use == "a connection":
            client_to(mosquitto.url).open().close()
        elif use == "a question for a name":
            assert not is_name_taken(Endpoint.parse(mosquitto.url), Claim.draw("me"))
        else:
            with pytest.raises(BrokerError):
                client_to(f"mqtt://127.0.0.1:{secured.closed}").open()

    gc.collect()
    gc.disable()
    try:
        before = _sockets()
        for _ in range(3):
            connect()
        # the thread of a client that was closed has its last word
        wait_until(lambda: _sockets() <= before)
    finally:
        gc.enable()


def test_what_was_published_with_qos_0_is_forgotten_once_it_is_written(
    mosquitto: EmbeddedBroker,
) -> None:
    """A line's processes publish many frames a second for years, and never ask for the backlog."""
    with MqttClient(
        Endpoint.parse(mosquitto.url), "", inbox=queue.Queue(), persistent=False
    ) as mqtt:
        for _ in range(2000):
            mqtt.publish("frames", bytes(100), qos=0)
            wait_until(lambda: len(mqtt._unwritten) <= 500)  # paho's thread has not come to it yet
        mqtt.publish("last", b"")
        assert mqtt.flush(60)
        mqtt.publish("frames", bytes(100), qos=0)
        assert len(mqtt._unwritten) <= 1
