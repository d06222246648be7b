"""`edge-node doctor --kit`: what is fit, ends soon, has ended or lies open,
as a member sees it at its own broker.
"""

import json
import queue
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from broker_config.mqtt.client import MqttClient
from broker_config.mqtt.endpoint import PORTS, Endpoint
from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.security import certificate_authority, member_list
from broker_config.security.kit import Kit
from broker_config.security.member_list import MemberListError
from edge.doctor import access_check, connection_check
from edge.doctor.probe import CheckContext, Result
from edge.doctor.run import LOCAL, exit_code
from tests.support.doctor_checks import EVERY, configured, diagnose, tried
from tests.support.paths import WIRE_FILE
from tests.support.plants import run
from tests.support.ports import free_port
from tests.support.provisioned_federation import Guarded

MACHINE = [find.__name__ for find in LOCAL]


@pytest.fixture(autouse=True)
def no_port_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port of MQTT without TLS is one where nobody listens:
    another broker may run on this machine.
    """
    monkeypatch.setitem(PORTS, "mqtt", free_port())


def examined(kit: Kit) -> dict[str, Result]:
    return diagnose(Endpoint.from_kit(kit, with_signer=False), kit.name)


@contextmanager
def tried_with(kit: Kit) -> Iterator[CheckContext]:
    with tried(Endpoint.from_kit(kit, with_signer=False), kit.name) as context:
        yield context


def with_certificate(broker: Guarded, name: str, left: timedelta) -> Kit:
    """A member's kit, with a certificate that ends so soon."""
    now = datetime.now(UTC)
    pair = certificate_authority.issue_member(
        broker.members.registry.ca, "steel", name, now + min(left, timedelta()), now + left
    )
    return msgspec.structs.replace(broker.kits[name], certificate=pair.certificate, key=pair.key)


def with_charter(broker: Guarded, name: str, **fields: object) -> Kit:
    """A member's kit, with a charter of its authority in which these fields differ."""
    kit, key = broker.kits[name], broker.members.registry.key
    return msgspec.structs.replace(
        kit, charter=member_list.sign(msgspec.structs.replace(kit.members(), **fields), key)
    )


@pytest.mark.slow
def test_all_that_a_member_needs_is_fit_at_a_provisioned_broker_even_while_others_try_it_out(
    provisioned: Guarded,
) -> None:
    with ThreadPoolExecutor() as pool:
        for checks in pool.map(examined, provisioned.kits.values()):
            broker = {name: check for name, check in checks.items() if name not in MACHINE}
            assert {
                name: check.found for name, check in broker.items() if check.outcome != "ok"
            } == {}
            assert "TLSv1.3" in checks["encryption"].found


@pytest.mark.slow
def test_with_a_kit_every_check_is_made_but_of_a_monitor_that_it_can_write(
    provisioned: Guarded,
) -> None:
    kit = provisioned.folder / "kits" / "plant-a.kit"
    passphrase = provisioned.members.passphrase("plant-a")
    result = run("doctor", "--kit", kit, "--json", EDGE_NODE_PASSPHRASE=passphrase)
    assert result.returncode == 0, result.stdout + result.stderr
    diagnosis = json.loads(result.stdout)
    assert [check["name"] for check in diagnosis["checks"]] == EVERY
    assert (diagnosis["name"], diagnosis["federation"]) == ("plant-a", topics.TRIAL)
    assert passphrase not in result.stdout
    monitor = examined(provisioned.kits["monitor"])
    assert monitor["access"].found == "monitor may write and read its topics"
    assert "latency" not in monitor
    assert monitor["protection"].outcome == "ok"


def test_the_signed_spec_of_the_own_federation_is_read(provisioned: Guarded) -> None:
    example = json.loads(WIRE_FILE.read_text())["Spec"]
    spec = msgspec.structs.replace(msgspec.convert(example, Spec), federation="steel")
    topic = topics.spec("steel")
    with MqttClient(
        Endpoint.from_kit(provisioned.kits["coordinator"]),
        "",
        inbox=queue.Queue(),
        persistent=False,
    ) as mqtt:
        mqtt.publish(topic, msgspec.json.encode(spec), retain=True)
        assert mqtt.flush(60)
        with tried_with(provisioned.kits["plant-a"]) as context:
            assert connection_check.federations(context).outcome == "unknown"
            assert connection_check.charter(context).outcome == "ok"
            assert "steel" in connection_check.federations(context).found
        mqtt.publish(topic, b"", retain=True)
        assert mqtt.flush(60)


@pytest.mark.parametrize(
    ("days", "outcome"), [(400, "ok"), (31, "ok"), (29, "warning"), (1, "warning")]
)
def test_a_certificate_that_ends_within_30_days_is_a_warning(
    days: int, outcome: str, provisioned: Guarded
) -> None:
    with tried_with(
        with_certificate(provisioned, "plant-a", timedelta(days=days, minutes=1))
    ) as context:
        found = connection_check.certificate(context)
    assert found.outcome == outcome
    assert f"in {days} day" in found.found
    assert ("--renew" in found.remedy) == (outcome == "warning")
    assert found.figures["days_left"] == days


def test_with_a_certificate_that_has_ended_the_broker_is_not_even_asked(
    provisioned: Guarded,
) -> None:
    checks = examined(with_certificate(provisioned, "plant-a", -timedelta(minutes=1)))
    assert list(checks) == ["address", "connection", "certificate", *MACHINE]
    assert checks["certificate"].outcome == "failure"
    assert "expired on" in checks["certificate"].found
    assert exit_code(list(checks.values())) == 69


@pytest.mark.parametrize(("days", "outcome"), [(31, "ok"), (29, "warning")])
def test_a_charter_that_ends_within_30_days_is_a_warning(
    days: int, outcome: str, provisioned: Guarded
) -> None:
    with tried_with(
        with_charter(provisioned, "plant-a", expires=datetime.now(UTC) + timedelta(days=days))
    ) as context:
        assert connection_check.charter(context).outcome == outcome


def test_with_a_charter_that_has_ended_the_broker_is_examined_all_the_same(
    provisioned: Guarded,
) -> None:
    checks = examined(
        with_charter(provisioned, "plant-a", expires=datetime.now(UTC) - timedelta(minutes=1))
    )
    assert {name for name, check in checks.items() if check.outcome == "failure"} == {"charter"}
    assert "has expired on" in checks["charter"].found
    assert checks["queue"].outcome == "ok"
    assert exit_code(list(checks.values())) == 1


def test_a_charter_without_us_is_a_failure_and_so_is_a_forged_one(provisioned: Guarded) -> None:
    everybody = provisioned.kits["plant-a"].members().nodes
    others = {name: member for name, member in everybody.items() if name != "plant-a"}
    left = with_charter(provisioned, "plant-a", nodes=others)
    with (
        tried_with(left) as context,
        pytest.raises(UsageError, match=r"plant-a.*'steel'"),
    ):
        connection_check.charter(context)
    forged = msgspec.structs.replace(provisioned.kits["plant-a"], authority=secrets.token_hex(32))
    with tried_with(forged) as context, pytest.raises(MemberListError, match="relied on"):
        connection_check.charter(context)


# What a broker lets others do


def test_a_broker_that_also_admits_whoever_has_no_certificate_is_found(
    provisioned: Guarded, tmp_path: Path
) -> None:
    folder, kit = provisioned.folder / "broker", provisioned.kits["plant-a"]
    tls = [
        f"{name} {folder / file}"
        for name, file in (
            ("certfile", "broker.pem"),
            ("keyfile", "broker.key"),
            ("cafile", "ca.pem"),
        )
    ]
    with configured(tmp_path, *tls) as port:
        found = protection(kit, port)
    assert found.outcome == "warning"
    assert found.found.startswith("anybody is admitted, without user name and certificate")
    assert "require_certificate true" in found.remedy


def protection(kit: Kit, port: int) -> Result:
    with tried(
        Endpoint.from_kit(kit, f"mqtts://127.0.0.1:{port}", with_signer=False), kit.name
    ) as context:
        return access_check.protection(context)


@pytest.mark.parametrize("admits", ["true", "false"])
def test_a_port_without_tls_beside_that_with_tls_is_found_whether_it_admits_us_or_not(
    admits: str, provisioned: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        configured(tmp_path, f"allow_anonymous {admits}") as port,
        tried_with(provisioned.kits["plant-a"]) as context,
    ):
        assert access_check.protection(context).outcome == "ok"
        monkeypatch.setitem(PORTS, "mqtt", port)
        found = access_check.protection(context)
    assert (found.outcome, found.remedy) == ("warning", f"close it (mosquitto: no listener {port})")
    assert f"port {port} speaks MQTT without TLS" in found.found
