"""`edge-node doctor`: what is wrong with a broker or a machine is found,
with the remedy; nothing is left behind.
"""

import datetime
import itertools
import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT5, MQTT311
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.messages import Spec
from broker_config.security.access_list import acl
from edge.doctor import access_check, broker_check, connection_check
from edge.doctor.probe import ProbeConnection
from edge.doctor.run import KIT, LOOPBACK, exit_code, run_checks
from tests.support.certificates import Authority
from tests.support.daemon_process import BLOCK_TORCH
from tests.support.doctor_checks import EVERY, configured, diagnose, tried
from tests.support.paths import REPOSITORY, WIRE_FILE
from tests.support.plants import run, start
from tests.support.proxy import Proxy
from tests.support.secured_mosquitto import Secured
from tests.support.trial_kind import TrialSpec, registered
from tests.support.waiting import PATIENCE

NAMES = [name for name in EVERY if name not in {find.__name__ for find in KIT}]  # without a kit
UNREACHABLE = 69


class Guarded(NamedTuple):
    """A mosquitto with passwords and the access list of docs/protocol.md."""

    port: int
    password: str

    def endpoint(self, name: str) -> Endpoint:
        return Endpoint.parse(f"mqtt://{name}@127.0.0.1:{self.port}", password=self.password)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "acl").write_text(f"{acl('+')}\nuser king\ntopic readwrite edge-node/#\n")
    (folder / "passwords").touch()
    password = secrets.token_hex(8)
    for name in ("plant-a", "coordinator", "king"):
        subprocess.run(
            ["mosquitto_passwd", "-b", str(folder / "passwords"), name, password], check=True
        )
    lines = (
        "allow_anonymous false",
        f"password_file {folder / 'passwords'}",
        f"acl_file {folder / 'acl'}",
    )
    with configured(folder, *lines) as port:
        yield Guarded(port, password)


class Observer:
    """Overhears everything that is published at a mosquitto."""

    def __init__(self, port: int):
        self.topics: set[str] = set()
        self.payloads: set[bytes] = set()
        self.heard = threading.Condition()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2)
        self._client.on_message = self._note
        ready = threading.Event()
        self._client.on_connect = lambda client, *_: client.subscribe("#", 1)
        self._client.on_subscribe = lambda *_: ready.set()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert ready.wait(60)

    def _note(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        with self.heard:
            self.topics.add(message.topic)
            self.payloads.add(message.payload)
            self.heard.notify_all()

    def wait_for(self, payload: bytes) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: payload in self.payloads, PATIENCE)


def kept_sessions(port: int, log: str) -> list[str]:
    """The clients in a broker's log whose sessions it still keeps."""
    persistent = set(re.findall(r" as (edge-node/doctor/\S+) \(p\d, c0", log))
    assert persistent
    endpoint = Endpoint.parse(f"mqtt://127.0.0.1:{port}")
    kept = []
    for client_id in sorted(persistent):
        with ProbeConnection(endpoint, client_id, MQTT5, 10, session=1) as connection:
            kept += [client_id] * connection.resumed
        ProbeConnection(endpoint, client_id, MQTT5, 10).open().close()
    return kept


def retained_topics(port: int) -> list[str]:
    with ProbeConnection(
        Endpoint.parse(f"mqtt://127.0.0.1:{port}"), "reader", MQTT5, 10
    ) as connection:
        connection.subscribe("#")
        connection.publish("end", b"")
        connection.wait_for(lambda each: each.topic == "end")
        return [each.topic for each in connection.received if each.retain]


# What a fit broker gives


def test_a_mosquitto_of_ours_is_fit_but_for_admitting_everybody(mosquitto: EmbeddedBroker) -> None:
    checks = diagnose(mosquitto.url)
    assert list(checks) == NAMES
    broker = [check for name, check in checks.items() if name not in ("clock", "disk", "python")]
    assert [check.name for check in broker if check.outcome != "ok"] == ["protection"]
    assert exit_code(list(checks.values())) == 0
    assert checks["queue"].figures["kept"] == 1000
    assert checks["latency"].figures["median_milliseconds"] > 0
    assert checks["throughput"].figures["bytes_per_second"] > 1_000_000
    assert checks["packets"].figures == {"chunk_bytes": 262_144, "packet_bytes": 268_435_455}
    assert "marked as a duplicate" in checks["redelivery"].found


@pytest.mark.slow
def test_a_broker_that_speaks_mqtt_3_1_1_is_tried_all_the_same(tmp_path: Path) -> None:
    with start_broker(tmp_path, kind="amqtt") as broker:
        checks = diagnose(broker.url)
    assert list(checks) == NAMES
    assert exit_code(list(checks.values())) == 0
    assert checks["version"].outcome == "warning"
    assert "3.1.1" in checks["version"].found
    assert "spec, round, status, down" in checks["protection"].found
    assert {
        checks[name].outcome for name in ("packets", "retained", "session", "queue", "will")
    } == {"ok"}
    assert "not delivered again" in checks["redelivery"].found


@pytest.mark.slow
def test_with_tls_the_certificate_s_end_is_told_in_time(secured: Secured) -> None:
    checks = diagnose(Endpoint.parse(f"mqtts://127.0.0.1:{secured.tls}", ca=secured.authority.ca))
    assert list(checks) == NAMES
    assert checks["encryption"].outcome == "warning"  # it is a day
    told = r"TLSv1\.\d, certificate for 127\.0\.0\.1, .* \d{4}-\d\d-\d\d, in [01] days?"
    assert re.fullmatch(told, checks["encryption"].found)
    assert "anybody is admitted" in checks["protection"].found
    assert {
        checks[name].outcome for name in ("access", "packets", "retained", "redelivery", "will")
    } == {"ok"}


def test_where_certificates_are_demanded_nobody_comes_without(secured: Secured) -> None:
    cert, key = secured.authority.issue("plant-a")
    url = f"mqtts://127.0.0.1:{secured.mutual}"
    with tried(Endpoint.parse(url, ca=secured.authority.ca, cert=cert, key=key)) as context:
        assert connection_check.login(context).found == "admitted with a certificate"
        assert "anybody" not in access_check.protection(context).found
    checks = diagnose(Endpoint.parse(url, ca=secured.authority.ca))
    assert checks["login"].outcome == "failure"
    assert "--cert" in checks["login"].remedy


@pytest.mark.slow
def test_over_websockets_the_same_is_tried(secured: Secured) -> None:
    with tried(f"ws://127.0.0.1:{secured.ws}") as context:
        finds = (
            connection_check.login,
            access_check.access,
            broker_check.retained,
            broker_check.session,
            broker_check.redelivery,
            broker_check.will,
        )
        assert [find(context).outcome for find in finds] == ["ok"] * 6


# Out of reach


def test_a_host_that_is_unknown_ends_it_with_69_but_this_machine_is_still_looked_at(
    tmp_path: Path,
) -> None:
    result = run("doctor", "mqtt://nowhere.invalid", "--state", tmp_path, "--json")
    assert result.returncode == UNREACHABLE
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert list(checks) == ["address", "clock", "disk", "python"]
    assert "nowhere.invalid is unknown" in checks["address"]["found"]


def test_a_port_where_nobody_listens_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    checks = diagnose(f"mqtt://127.0.0.1:{port}")
    assert "nothing listens" in checks["connection"].found
    assert exit_code(list(checks.values())) == UNREACHABLE


def test_a_server_that_says_nothing_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        checks = diagnose(f"mqtt://127.0.0.1:{server.getsockname()[1]}", timeout=0.3)
    assert "within 0.3 s" in checks["login"].found
    assert exit_code(list(checks.values())) == UNREACHABLE


def test_a_wrong_password_is_not_let_in(guarded: Guarded) -> None:
    checks = diagnose(replace(guarded.endpoint("plant-a"), password="wrong"))  # noqa: S106
    assert (checks["login"].outcome, "version" in checks) == ("failure", False)
    assert "not authorized" in checks["login"].found
    assert exit_code(list(checks.values())) == UNREACHABLE


def test_a_certificate_for_another_host_or_of_another_authority_is_told_apart(
    secured: Secured, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger").ca
    for host, ca, remedy in (
        ("localhost", secured.authority.ca, "host name that the certificate was made for"),
        ("127.0.0.1", stranger, "--ca FILE"),
    ):
        check = diagnose(Endpoint.parse(f"mqtts://{host}:{secured.tls}", ca=ca))["encryption"]
        assert check.outcome == "failure"
        assert remedy in check.remedy


def test_a_certificate_that_has_expired_is_to_be_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "plant")
    certificate, key = authority.issue("broker", datetime.timedelta(minutes=-1))
    with configured(tmp_path / "broker", f"certfile {certificate}", f"keyfile {key}") as port:
        check = diagnose(Endpoint.parse(f"mqtts://127.0.0.1:{port}", ca=authority.ca))["encryption"]
    assert "expired" in check.found
    assert "renewed" in check.remedy


# What the broker lets us do


@pytest.mark.parametrize("name", ["plant-a", "coordinator"])
def test_behind_the_protocol_s_access_list_a_node_and_a_coordinator_have_what_they_need(
    guarded: Guarded, name: str
) -> None:
    with tried(guarded.endpoint(name), name) as context:
        finds = (
            access_check.access,
            access_check.protection,
            broker_check.packets,
            broker_check.retained,
            broker_check.session,
            broker_check.will,
        )
        for find in finds:
            found = find(context)
            assert found.outcome == "ok", found
    assert context.echoes


def test_a_user_that_acts_for_another_node_may_not_write_its_topics(guarded: Guarded) -> None:
    checks = diagnose(guarded.endpoint("plant-a"), "plant-b")
    assert checks["access"].outcome == "failure"
    assert checks["access"].found == "plant-b may not write up, presence, want, chunks"
    assert "--as" in checks["access"].remedy
    assert not set(checks) & {find.__name__ for find in LOOPBACK}


def test_a_node_that_may_write_the_coordinator_s_topics_is_a_warning(guarded: Guarded) -> None:
    with tried(guarded.endpoint("king")) as context:
        found = access_check.protection(context)
    assert found.outcome == "warning"
    assert "spec, round, status, down, presence, want, chunks" in found.found
    assert "anybody" not in found.found
    assert "docs/protocol.md" in found.remedy


def test_the_topics_of_a_further_kind_are_tried_once_a_federation_of_it_is_announced(
    tmp_path: Path,
) -> None:
    (tmp_path / "acl").write_text(
        "topic readwrite edge-node/#\ntopic deny edge-node/v1/+/trial/#\n"
    )
    spec = TrialSpec(federation="press", run="0" * 16, software="", parties=3)
    with (
        registered(),
        configured(tmp_path, f"acl_file {tmp_path / 'acl'}") as port,
        tried(f"mqtt://127.0.0.1:{port}") as context,
    ):
        assert connection_check.federations(context).found == "none is announced here yet"
        assert access_check.access(context).outcome == "ok"
        with context.connection("coordinator") as coordinator:
            assert not coordinator.publish(topics.spec("press"), encode(spec), retain=True)
        assert connection_check.federations(context).found == "press (3 parties)"
        found = access_check.access(context)
    assert (found.outcome, found.found) == ("failure", "plant-a may not write answer")


def test_a_federation_of_a_kind_that_is_not_installed_is_a_warning(
    mosquitto: EmbeddedBroker,
) -> None:
    spec = TrialSpec(federation="press", run="0" * 16, software="", parties=3)
    with tried(mosquitto.url) as context:
        with context.connection("coordinator") as connection:
            connection.publish(topics.spec("press"), encode(spec), retain=True)
        found = connection_check.federations(context)
    assert found.outcome == "warning"
    assert "press" in found.found
    assert "TrialSpec" in found.found


@pytest.mark.slow
def test_mqtt_3_1_1_does_not_say_what_is_denied(guarded: Guarded) -> None:
    with tried(guarded.endpoint("plant-a"), version=MQTT311) as context:
        needed, protected = access_check.access(context), access_check.protection(context)
    assert (needed.outcome, protected.outcome) == ("ok", "unknown")
    assert "as to up, want, chunks, MQTT 3.1.1 does not say" in needed.found


# Nobody is disturbed, nothing is left


def announce(port: int, nodes: int) -> Spec:
    """Retain the spec of a federation of `nodes`."""
    example = json.loads(WIRE_FILE.read_text())["Spec"]
    spec = msgspec.structs.replace(msgspec.convert(example, Spec), nodes=nodes)
    with ProbeConnection(
        Endpoint.parse(f"mqtt://127.0.0.1:{port}"), "coordinator", MQTT5, 10
    ) as connection:
        connection.publish(
            f"edge-node/v1/{spec.federation}/spec", msgspec.json.encode(spec), retain=True
        )
    return spec


def test_a_spec_that_cannot_be_read_is_a_warning(mosquitto: EmbeddedBroker) -> None:
    with tried(mosquitto.url) as context:
        with context.connection("coordinator") as connection:
            connection.publish("edge-node/v1/steel/spec", b'{"type": "Spec"}', retain=True)
        found = connection_check.federations(context)
    assert found.outcome == "warning"
    assert found.found.startswith("the spec of steel cannot be read")


@pytest.mark.slow
def test_other_federations_are_not_disturbed_and_the_broker_is_left_as_it_was(
    tmp_path: Path,
) -> None:
    with configured(tmp_path, "log_type all") as port:
        spec = announce(port, nodes=5)
        theirs = f"edge-node/v1/{spec.federation}/spec"
        observer = Observer(port)
        checks = diagnose(f"mqtt://127.0.0.1:{port}")
        assert f"{spec.federation} ({spec.model}, 5 nodes)" in checks["federations"].found
        assert {topic.split("/")[2] for topic in observer.topics - {theirs}} == {"doctor"}
        assert retained_topics(port) == [theirs]
        assert kept_sessions(port, (tmp_path / "log").read_text()) == []


def test_what_a_check_leaves_when_it_is_interrupted_is_cleared(mosquitto: EmbeddedBroker) -> None:
    with tried(mosquitto.url) as context:
        with context.connection("retained") as connection:
            context.retain(connection, b"kept")
        assert retained_topics(mosquitto.port) == [context.topic]
    assert retained_topics(mosquitto.port) == []


@pytest.mark.slow
def test_ctrl_c_leaves_the_broker_as_it_was(tmp_path: Path) -> None:
    with configured(tmp_path / "broker", "log_type all") as port:
        observer = Observer(port)
        process = start(
            "doctor", f"mqtt://127.0.0.1:{port}", "--state", tmp_path, log=tmp_path / "log"
        )
        observer.wait_for(b"q999")  # the session is away, and messages wait for it
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert retained_topics(port) == []
        assert kept_sessions(port, (tmp_path / "broker" / "log").read_text()) == []


@pytest.mark.slow
def test_a_connection_that_breaks_meanwhile_is_a_finding_and_the_rest_is_tried(
    mosquitto: EmbeddedBroker,
) -> None:
    with Proxy(mosquitto.port, rate=2_000_000) as proxy, tried(proxy.url, echoes=True) as context:
        observer = Observer(mosquitto.port)
        third = bytes(3) + b"\x02" + bytes(262_144)  # chunk of the throughput
        threading.Thread(target=lambda: (observer.wait_for(third), proxy.cut())).start()
        checks = {
            check.name: check
            for check in itertools.islice(run_checks(context), NAMES.index("session") + 1)
        }
    assert checks["throughput"].found == "the broker ended the connection: without a word"
    assert checks["session"].outcome == "ok"


def test_two_doctors_of_one_name_do_not_push_each_other_out(mosquitto: EmbeddedBroker) -> None:
    with (
        tried(mosquitto.url) as one,
        tried(mosquitto.url) as other,
        one.connection("session", session=60) as connection,
    ):
        with other.connection("session", session=60) as second:
            assert not second.resumed
        assert connection.subscribe(one.topic) == []


# The command


@pytest.mark.slow
def test_a_table_is_printed_without_torch_line_by_line(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    code = (
        f"{BLOCK_TORCH}\nsys.argv = ['edge-node', 'doctor', {mosquitto.url!r}, '--state', "
        f"{str(tmp_path)!r}]\n"
    )
    code += "from edge_node.cli import main; main.main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert re.fullmatch(rf"{mosquitto.url}, as node-[0-9a-f]{{8}}", lines[0])
    assert [line[9:].split()[0] for line in lines[1:-1] if not line.startswith(" ")] == NAMES
    assert re.fullmatch(r"1 warning, (1 unknown, )?\d+ ok", lines[-1])


def test_a_failure_ends_it_with_1(guarded: Guarded, tmp_path: Path) -> None:
    url = f"mqtt://plant-a@127.0.0.1:{guarded.port}"
    options = ("--as", "plant-b", "--json", "--state", tmp_path)
    result = run("doctor", url, *options, EDGE_NODE_PASSWORD=guarded.password)
    assert result.returncode == 1
    assert json.loads(result.stdout)["name"] == "plant-b"
    assert guarded.password not in result.stdout


def test_every_check_stands_in_the_troubleshooting_page() -> None:
    page = (
        (REPOSITORY / "docs" / "troubleshooting.md")
        .read_text()
        .partition("## What the doctor finds")[2]
    )
    assert re.findall(r"^\| `(\w+)` \|", page.partition("\n## ")[0], re.MULTILINE) == EVERY
