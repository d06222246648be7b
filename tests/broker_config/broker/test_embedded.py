"""The broker that starts without configuration, and never stays behind."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from broker_config.broker import embedded
from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import Delivery, Endpoint, MqttClient
from broker_config.protocol.errors import EdgeNodeError
from tests.support.waiting import wait_until

KINDS = pytest.mark.parametrize("kind", ["mosquitto", "amqtt"])


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_it_serves_until_it_is_stopped(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT", 60.0)  # a busy machine may take long to end it
    assert broker.url == f"mqtt://127.0.0.1:{broker.port}"
    inbox: queue.Queue[object] = queue.Queue()
    with MqttClient(Endpoint.parse(broker.url), "client", inbox=inbox, persistent=False) as mqtt:
        mqtt.publish("topic", b"payload")
        assert mqtt.flush(60)
    broker.stop()
    broker.stop()
    assert broker.process.returncode >= 0, "it was killed"
    assert not accepts(broker.port)


def test_it_listens_to_this_machine_only(broker: EmbeddedBroker) -> None:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    lines += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    listening = {
        line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{broker.port:04X}")
    }
    assert listening == {f"0100007F:{broker.port:04X}"}


@KINDS
def test_it_says_nothing_on_the_terminal_and_keeps_its_log_in_the_folder(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a folder with spaces"
    with start_broker(folder, kind=kind) as broker:
        vandal = socket.create_connection(("127.0.0.1", broker.port))
        vandal.sendall(b"GET / HTTP/1.1\r\n\r\n")
        vandal.close()
    assert capfd.readouterr() == ("", "")
    assert (folder / "broker.log").read_text()


@KINDS
def test_clients_that_connect_and_subscribe_all_at_once_are_all_served(
    kind: str, tmp_path: Path
) -> None:
    with start_broker(tmp_path, kind=kind) as broker, contextlib.ExitStack() as stack:
        endpoint = Endpoint.parse(broker.url)

        def make_client(name: str, topics: list[str]) -> tuple[MqttClient, queue.Queue[object]]:
            inbox: queue.Queue[object] = queue.Queue()
            client = MqttClient(endpoint, name, inbox=inbox, persistent=False)
            for topic in topics:
                client.subscribe(topic, qos=1)
            return client, inbox

        # amqtt goes through all filters and retained messages for each new client, and lets others
        # in meanwhile.
        retained = [f"retained/{number}" for number in range(20)]
        speaker, heard = make_client("speaker", retained)
        stack.enter_context(speaker)
        for topic in retained:
            speaker.publish(topic, b"payload" * 1000, retain=True)
        for _ in retained:
            wait_for_delivery(heard)

        clients = [make_client(f"client-{number}", [f"own/{number}"]) for number in range(30)]
        threads = [
            threading.Thread(target=stack.enter_context, args=(client,)) for client, _ in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, (client, _) in enumerate(clients):
            client.publish(f"own/{number}", b"payload")
        for number, (_, inbox) in enumerate(clients):
            while wait_for_delivery(inbox).topic != f"own/{number}":
                pass


def wait_for_delivery(inbox: queue.Queue[object]) -> Delivery:
    while True:
        arrived = inbox.get(timeout=60)
        if isinstance(arrived, Delivery):
            return arrived


@KINDS
def test_a_taken_port_is_named(kind: str, tmp_path: Path) -> None:
    with (
        start_broker(tmp_path / "other") as other,
        pytest.raises(EdgeNodeError, match=f"{other.port}.*in use"),
    ):
        start_broker(tmp_path, port=other.port, kind=kind)


def test_a_broker_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(EdgeNodeError, match="max_packet_size") as caught:
        start_broker(tmp_path, kind="mosquitto", max_packet=5)
    assert str(tmp_path / "broker.log") in caught.value.remedy


def test_mosquitto_is_preferred(tmp_path: Path) -> None:
    with start_broker(tmp_path) as broker:
        assert broker.kind == "mosquitto"


def test_without_mosquitto_it_is_amqtt_unless_mosquitto_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "find_mosquitto", lambda: None)
    with start_broker(tmp_path) as broker:
        assert broker.kind == "amqtt"
    with pytest.raises(EdgeNodeError, match="not installed"):
        start_broker(tmp_path, kind="mosquitto")


def test_mosquitto_does_not_drop_what_waits_for_a_client_that_is_away(
    mosquitto: EmbeddedBroker,
) -> None:
    endpoint = Endpoint.parse(mosquitto.url)
    inbox: queue.Queue[object] = queue.Queue()
    with MqttClient(endpoint, "away", inbox=inbox, persistent=True) as mqtt:
        mqtt.subscribe("news")
        mqtt.publish("news", b"the session stands")
        mqtt.ack(
            next(
                event
                for event in iter(lambda: inbox.get(timeout=60), None)
                if isinstance(event, Delivery)
            )
        )
    with MqttClient(endpoint, "sender", inbox=queue.Queue(), persistent=False) as sender:
        for number in range(3000):
            sender.publish("news", str(number).encode())
            if number % 500 == 499:
                assert sender.flush(60)
    received = 0
    mqtt = MqttClient(endpoint, "away", inbox=inbox, persistent=True)
    mqtt.subscribe("news")
    with mqtt:
        while received < 3000:
            if isinstance(event := inbox.get(timeout=60), Delivery):
                assert event.payload == str(received).encode()
                received += 1
                mqtt.ack(event)


PARENT = """
import signal, subprocess, sys, time
from pathlib import Path
from broker_config.broker.embedded import start_broker
signal.signal(signal.SIGINT, \
signal.default_int_handler)  # a shell's background jobs start with it ignored
broker = start_broker(Path(sys.argv[1]), kind=sys.argv[2])
try:
    print(broker.port, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
    broker.stop()
"""


def start_parent(folder: Path, kind: str) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, folder, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout
    return parent, int(parent.stdout.readline())


@KINDS
def test_it_dies_with_a_parent_that_is_killed(kind: str, tmp_path: Path) -> None:
    parent, port = start_parent(tmp_path, kind)
    assert accepts(port)
    parent.kill()
    parent.wait()
    wait_until(lambda: not accepts(port))


@KINDS
def test_ctrl_c_does_not_reach_it(kind: str, tmp_path: Path) -> None:
    parent, port = start_parent(tmp_path, kind)
    assert parent.stdin
    assert parent.stdout
    broker = psutil.Process(parent.pid).children(recursive=True)
    assert broker
    assert parent.pid not in {os.getpgid(each.pid) for each in broker}, (
        "the terminal's signals go to a group"
    )
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout.readline() == "interrupted\n"
    assert accepts(port)
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.wait(60) == 0
    assert not accepts(port)


@KINDS
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent died"
)
def test_it_dies_with_its_keeper(kind: str, tmp_path: Path) -> None:
    with start_broker(tmp_path, kind=kind) as broker:
        broker.process.kill()
        wait_until(lambda: not accepts(broker.port))


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent died"
)
def test_a_supervisor_that_is_killed_as_it_starts_its_command_leaves_none() -> None:
    for _ in range(20):  # about every fourth meets the moment before the child asks to die with it
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "broker_config.broker.supervisor", "sleep", "60"],
            stdin=subprocess.PIPE,
        )
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
        while not (child := children.read_text()):
            assert supervisor.poll() is None
        supervisor.kill()
        supervisor.communicate()
        wait_until(lambda child=child: not _runs(int(child)))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_outlives_the_thread_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT", 60.0)  # a busy machine may take long to end it
    started: list[EmbeddedBroker] = []
    thread = threading.Thread(target=lambda: started.append(start_broker(tmp_path)))
    thread.start()
    thread.join()
    wait_until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())
    started[0].stop()
    assert started[0].process.returncode >= 0, "it was killed when the thread ended"
