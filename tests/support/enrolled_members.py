"""Members that have made their own keys, and the administrator who certifies them,
as they do it: by files.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from broker_config.security import certificate_request, enrolment
from broker_config.security.enrolment import Enrolment
from broker_config.security.kit import Kit
from broker_config.security.member_registry import ChangeRequest, MemberRegistry
from broker_config.security.provisioning import provision
from tests.support.ports import HOST


class Plant:
    """A member's folder at its plant."""

    def __init__(self, folder: Path, name: str, federation: str = "steel"):
        self.place = Enrolment(folder / f"{name}-kit", federation, name)
        self.fingerprint = enrolment.request(self.place).fingerprint

    @property
    def passphrase(self) -> str:
        return self.place.passphrase.read_text()

    def accept(self, answer: Path) -> Kit:
        return enrolment.accept(self.place, answer).kit


class Administration:
    """The administrator's folder."""

    def __init__(self, folder: Path, federation: str = "steel"):
        self.folder, self.federation = folder, federation

    def provision(
        self, *plants: Plant, ago: timedelta = timedelta(), **change: Any
    ) -> MemberRegistry:
        """What a run with the requests of these plants makes of the register."""
        requests = [certificate_request.read(plant.place.request) for plant in plants]
        request = ChangeRequest(requests=requests, **change)
        return provision(self.folder, self.federation, request, datetime.now(UTC) - ago).registry

    def found(self, *plants: Plant, **change: Any) -> MemberRegistry:
        return self.provision(*plants, hosts=[HOST], **change)

    def answer(self, name: str) -> Path:
        return self.folder / "answers" / f"{name}.answer"
