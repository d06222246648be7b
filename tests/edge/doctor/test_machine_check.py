"""This machine: its disk, its clock, its Python; each fault is found, with the remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.protocol.messages import Spec
from edge.doctor import machine_check
from tests.support.doctor_checks import tried
from tests.support.paths import REPOSITORY, WIRE_FILE


def test_a_state_folder_that_cannot_be_written_is_a_failure(mosquitto: EmbeddedBroker) -> None:
    with tried(mosquitto.url, "plant-a") as context:
        context.state = Path("/proc/edge-node")
        found = machine_check.disk(context)
    assert found.outcome == "failure"
    assert "/proc cannot be written" in found.found
    assert "--state" in found.remedy


def test_the_disk_is_compared_with_what_the_federation_needs(tmp_path: Path) -> None:
    with tried("mqtt://127.0.0.1") as context:
        example = json.loads(WIRE_FILE.read_text())["Spec"]
        tensor = {"encoder.weight": {"shape": [1 << 40], "scale": 50}}  # 4 TB
        context.specs = [msgspec.convert({**example, "tensors": tensor}, Spec)]
        context.state = tmp_path / "not" / "there" / "yet"
        found = machine_check.disk(context)
    assert found.outcome == "failure"
    assert found.figures["needed_bytes"] > 20 * 4 * (1 << 40)
    assert list(tmp_path.iterdir()) == []


def test_a_clock_from_before_the_installation_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check.time, "time", lambda: 0.0)
    with tried("mqtt://127.0.0.1") as context:
        found = machine_check.clock(context)
    assert found.outcome == "warning"
    assert "1970-01-01" in found.found


@pytest.mark.parametrize(("said", "outcome"), [("yes", "ok"), ("no", "warning"), ("", "unknown")])
def test_whether_a_time_service_keeps_the_clock_right_is_asked_of_systemd(
    said: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timedatectl").write_text(f"#!/bin/sh\necho {said}\n")
    (tmp_path / "timedatectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with tried("mqtt://127.0.0.1") as context:
        assert machine_check.clock(context).outcome == outcome


SHADOWED = """
import sys
from edge.doctor.machine_check import python
found = python(None)
print(found.outcome, found.found)
"""


def test_another_package_that_has_our_import_name_is_found(tmp_path: Path) -> None:
    """It comes first on the path, as what pip installs comes before what an editable install
    adds.
    """
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    command = [sys.executable, "-P", "-c", SHADOWED]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert result.stdout.startswith("failure")
    assert f"trainer is {tmp_path / 'trainer'}, not edge-node's" in result.stdout


def test_another_package_that_wrote_into_our_folder_is_found(tmp_path: Path) -> None:
    information = tmp_path / "trainer-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: trainer\nVersion: 1.0\n")
    (information / "top_level.txt").write_text("trainer\n")
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    command = [sys.executable, "-P", "-c", SHADOWED]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert result.stdout.startswith("warning")
    assert "trainer (trainer)" in result.stdout
