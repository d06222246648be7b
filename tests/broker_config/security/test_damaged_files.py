"""Every file of a federation's folder, damaged: provisioning writes it again,
or says what must be brought back.
"""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from broker_config.security import certificate_request, kit
from broker_config.security.member_registry import ChangeRequest
from broker_config.security.provisioning import provision
from tests.support.damaged_files import FAULTS, RECOVERED, Case, Outcome, Snapshot, try_all, unknown
from tests.support.enrolled_members import Plant

KNOWN = (
    "federation/authority/register.json",
    "federation/authority/lock",
    "federation/passphrases.txt",
    "federation/kits/*.kit",
    "federation/answers/*.answer",
    "federation/trust/*.trust",
    *(
        f"federation/broker/{each}"
        for each in ("mosquitto.conf", "acl", "ca.pem", "crl.pem", "broker.key", "broker.pem")
    ),
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _part(file: str) -> str:
    """Kits take a fifth of a second each to open, so one of each folder is damaged at a time."""
    return file.split("/")[1]


class Provisioned:
    """A federation from which a node was revoked, with a copy of its folder from before."""

    def __init__(self, folder: Path):
        self.snapshot, self._scratch = (
            Snapshot(folder / "newer", folder / "older", _part),
            folder / "scratch",
        )
        first = ChangeRequest(
            nodes=("plant-a", "plant-b"), hosts=("broker",), broker_folder="/etc/mosquitto"
        )
        self._provision(self.snapshot.older, first)
        shutil.copytree(self.snapshot.older, self.snapshot.newer)
        requests = (certificate_request.read(Plant(folder, "plant-d").place.request),)
        change = ChangeRequest(nodes=("plant-c",), requests=requests, revoke=("plant-b",))
        self._provision(self.snapshot.newer, change)
        self._expected = self._content(self.snapshot.newer)

    def _provision(self, folder: Path, request: ChangeRequest) -> None:
        folder.mkdir(exist_ok=True)
        provision(folder / "federation", "steel", request, NOW)

    def start(self, folder: Path, _: str) -> Outcome:
        self._provision(folder, ChangeRequest())
        assert self._content(folder) == self._expected
        return RECOVERED

    def _content(self, folder: Path) -> dict[str, object]:
        """Of all files; a kit's, since each is encrypted by a salt of its own."""
        here = folder / "federation"
        phrases = dict(line.split() for line in (here / "passphrases.txt").read_text().splitlines())
        files = [path for path in here.rglob("*") if path.is_file() and path.name != "lock"]
        kits: dict[str, object] = {
            path.name: kit.read(path, phrases[path.stem]) for path in files if path.suffix == ".kit"
        }
        return kits | {
            str(path.relative_to(here)): path.read_bytes()
            for path in files
            if path.suffix != ".kit"
        }

    def try_all(self, cases: list[Case]) -> dict[Case, Outcome]:
        return try_all("authority", self.snapshot, cases, self.start, self._scratch)


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return Provisioned(tmp_path_factory.mktemp("authority"))


def test_every_file_is_of_a_known_kind(provisioned: Provisioned) -> None:
    assert unknown(provisioned.snapshot.files(), KNOWN) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_each_file_ends_well(fault: str, provisioned: Provisioned) -> None:
    cases = [case for case in provisioned.snapshot.cases() if case.fault == fault]
    assert provisioned.try_all(cases).keys() == {*cases}


@pytest.mark.slow
def test_the_registry_fares_as_it_should(provisioned: Provisioned) -> None:
    cases = [case for case in provisioned.snapshot.cases() if case.file.endswith("register.json")]
    assert len(cases) == len(FAULTS)
    assert set(provisioned.try_all(cases).values()) == {"refused, remedy works"}
