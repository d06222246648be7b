"""Verdicts at a real OPC UA server: all arrive in order, also at one that is killed;
what is wrong is told.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from asyncua.crypto import cert_gen
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from broker_config.protocol.errors import UsageError
from edge.config.instance import Instance
from edge.daemon.line_settings import parse
from edge.sinks.sink import SinkDown
from edge_node.extensions.opcua.sink import OpcUa, Settings
from tests.support.numbered_outcomes import OutcomeProcess, item
from tests.support.opcua_server import LOCKED, OpcUaServer, node
from tests.support.outcomes_at_noon import failure, notice, verdict
from tests.support.ports import free_port
from tests.support.waiting import wait_until

PASSWORD = "PLC_PASSWORD"  # noqa: S105  (its variable)
ALL = ("image", "label", "confidence", "defect", "doubt", "status", "id", "time", "seq")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpcUaServer]:
    server = OpcUaServer(tmp_path_factory.mktemp("opcua") / "server").start()
    yield server
    server.kill()


@pytest.fixture
def server(running: OpcUaServer) -> OpcUaServer:
    """One to which nothing was written."""
    running.forget()
    return running


def table(server: OpcUaServer | str, *names: str, **others: Any) -> dict[str, Any]:
    url = server if isinstance(server, str) else server.url
    return {
        "kind": "opcua",
        "url": url,
        "nodes": {name: node(name) for name in names or ALL},
    } | others


def opened(tmp_path: Path, wanted: dict[str, Any]) -> OpcUa:
    [settings] = parse({"sinks": [wanted]}, tmp_path / "line.toml").sinks
    assert isinstance(settings, Settings)
    sink = settings.open_sink(Instance("line-1", tmp_path), None)  # type: ignore[arg-type]
    assert isinstance(sink, OpcUa)
    return sink


def why(tmp_path: Path, wanted: dict[str, Any]) -> str:
    """What the sink says when it delivers."""
    with closing(opened(tmp_path, wanted)) as sink, pytest.raises(SinkDown) as caught:
        sink.deliver([item(1)])
    return str(caught.value)


def refused(tmp_path: Path, wanted: dict[str, Any]) -> str:
    """What the sink says at the start."""
    with pytest.raises(UsageError) as caught:
        opened(tmp_path, wanted)
    return str(caught.value)


def test_a_verdict_becomes_values_and_its_number_comes_last(server, tmp_path):
    with closing(opened(tmp_path, table(server))) as sink:
        sink.deliver([item(1, verdict(7, defect=True, doubts=("novel",))), item(2, notice())])
        sink.deliver([])
        sink.deliver([item(2**32 + 3, verdict(8, label="none", defect=False))])
    assert server.written("image") == ["part-7.png", "part-8.png"]
    assert server.written("label") == ["scratches", "none"]
    assert server.written("confidence") == [0.75, 0.75]
    assert server.written("defect") == [True, False]
    assert server.written("doubt") == [True, False]
    assert server.written("status") == ["doubtful", "ok"]
    assert server.written("id") == [f"{7:032x}", f"{8:032x}"]
    assert server.written("time") == ["2026-03-01T12:00:00.250000+00:00"] * 2
    assert server.written("seq") == [1, 3], (
        "of a number that is too large for the variable its lowest bits"
    )
    assert server.names()[len(ALL) - 1 :: len(ALL)] == ["seq", "seq"]


def test_an_image_that_could_not_be_inspected_passes_for_no_good_part(server, tmp_path):
    with closing(opened(tmp_path, table(server))) as sink:
        sink.deliver([item(1, failure())])
    assert [
        server.written(name) for name in ("label", "confidence", "defect", "doubt", "status")
    ] == [
        [""],
        [0.0],
        [True],
        [True],
        ["failed"],
    ]


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_gets_everything_in_order(server, tmp_path):
    process = OutcomeProcess(
        [table(server, "image", "seq")], tmp_path / "state", count=300, pause=0.002
    )
    wait_until(lambda: len(server.written("seq")) > 50)
    server.kill()
    process.until()
    wait_until(lambda: "takes no outcomes" in process.log.read_text())
    server.start()
    wait_until(lambda: "299" in server.written("image"))
    log = process.end()
    found = [int(image) for image in server.written("image")]
    assert list(dict.fromkeys(found)) == list(range(300))
    assert len(found) <= 301, "only what was under way is written again"
    assert "takes outcomes again" in log
    assert "server answers" in log or "Connection" in log


def test_a_node_that_is_not_there_or_holds_something_else_or_is_locked_is_told_with_its_id(
    server, tmp_path
):
    wrong = why(tmp_path, table(server, nodes={"label": "ns=2;s=lable"}))
    assert "ns=2;s=lable for label" in wrong
    assert "browser shows it" in wrong
    assert "label holds Boolean" in why(tmp_path, table(server, nodes={"label": node("defect")}))
    locked = why(tmp_path, table(server, nodes={"label": LOCKED}))
    assert "(BadUserAccessDenied)" in locked


@pytest.mark.slow
def test_a_wrong_password_and_a_server_that_is_away_are_told_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv(PASSWORD, "right")
    server = OpcUaServer(tmp_path / "server", users={"line": "right"}).start()
    wanted = table(server, "label", user="line", secret=PASSWORD)
    try:
        with closing(opened(tmp_path, wanted)) as sink:
            sink.deliver([item(1)])
        assert server.written("label") == ["inclusion"]
        monkeypatch.setenv(PASSWORD, "wrong")
        assert "user line" in why(tmp_path, wanted)
        assert "without a user" in why(tmp_path, table(server, "label"))
    finally:
        server.kill()
    away = why(tmp_path, wanted)
    assert f"no OPC UA server answers at {server.url}" in away
    assert "firewall" in away


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of an application and its key, as asyncua makes them."""
    key = cert_gen.generate_private_key()
    made = cert_gen.generate_self_signed_app_certificate(
        key,
        name,
        {},
        [x509.UniformResourceIdentifier(f"urn:{name}"), x509.DNSName("localhost")],
        extended=[ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
        days=2,
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / f"{name}-key.pem").write_bytes(cert_gen.dump_private_key_as_pem(key))
    return str(folder / f"{name}.pem"), str(folder / f"{name}-key.pem")


@pytest.mark.slow
def test_certificates_encrypt_the_connection_and_one_of_another_server_ends_it(tmp_path):
    cert, key = certificate(tmp_path, "plc")
    certificate(tmp_path, "line")
    server = OpcUaServer(tmp_path / "server", cert=cert, key=key).start()
    try:
        files = {"cert": "line.pem", "key": "line-key.pem", "server_cert": "plc.pem"}
        with closing(opened(tmp_path, table(server, "label", **files))) as sink:
            sink.deliver([item(1)])
        assert server.written("label") == ["inclusion"]
        assert "secured so" in why(tmp_path, table(server, "label"))
        assert server.url in why(
            tmp_path, table(server, "label", **files | {"server_cert": "line.pem"})
        )
    finally:
        server.kill()


def test_what_cannot_be_is_said_at_the_start(tmp_path, monkeypatch):
    url = f"opc.tcp://127.0.0.1:{free_port()}"
    assert "write opc.tcp://HOST:4840" in refused(tmp_path, table("http://plc.local", "label"))
    assert (
        "secret"
        not in refused(tmp_path, table("opc.tcp://me:secret@plc.local", "label")).partition("\n")[0]
    )
    assert "'label'" in refused(tmp_path, table(url, nodes={"label": "label"}))
    assert "would write nothing" in refused(tmp_path, table(url, nodes={}))
    assert "PLC_PASSWORD" in refused(tmp_path, table(url, "label", user="line", secret=PASSWORD))
    assert "three PEM files" in refused(tmp_path, table(url, "label", cert="line.pem"))
    files = {"cert": "line.pem", "key": "line-key.pem", "server_cert": "plc.pem"}
    assert "line.pem" in refused(tmp_path, table(url, "label", **files))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install 'edge-node[opcua]'" in refused(tmp_path, table(url, "label"))
