"""Coordinators and nodes of two versions in one federation,
and an upgrade of all of them while it runs.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from tests.support.later_version import later_version
from tests.support.plants import CLASSES, FEDERATION, Process, draw, drawn_weights, run, start
from tests.support.waiting import wait_until
from trainer.federation.server.journal import history

pytestmark = pytest.mark.slow
NODES = ("plant-a", "plant-b")
ROUNDS = 8
THIS: dict[str, str] = {}


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the later version."""
    return later_version(tmp_path_factory.mktemp("later"))


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plants")
    return {name: draw(folder / name, 6, seed) for seed, name in enumerate(NODES)}


class Federation:
    """Its processes, each of a version: an environment, empty for this one."""

    def __init__(self, broker: EmbeddedBroker, plants: dict[str, Path], folder: Path):
        self.url, self._plants, self._folder = broker.url, plants, folder
        folder.mkdir()
        self.processes: dict[str, Process] = {}

    def start(self, name: str, version: Mapping[str, str]) -> None:
        if name == "coordinator":
            words = [
                "coordinate",
                self.url,
                "--classes",
                ",".join(CLASSES),
                "--nodes",
                len(NODES),
                *FEDERATION,
                "--rounds",
                ROUNDS,
                "--weights",
                drawn_weights(),
                "--training",
                "local_epochs=1",
            ]
        else:
            words = ["join", self.url, "--name", name, "--data", self._plants[name]]
        log = self._folder / f"{name}-{len(list(self._folder.glob(f'{name}-*.log')))}.log"
        words += ["--state", self._folder / name]
        self.processes[name] = start(*words, log=log, anew=bool(version), **version)

    def upgrade(self, name: str, version: Mapping[str, str]) -> None:
        """Stop a process in order, and start it again as another version."""
        self.processes[name].send_signal(signal.SIGTERM)
        assert self.processes[name].wait(60) == 130, self.log(name)
        self.start(name, version)

    def reach(self, rounds: int) -> None:
        """Wait until so many are closed."""
        wait_until(lambda: f"round {rounds}" in self.log("coordinator"))

    def log(self, name: str) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob(f"{name}-*.log")))

    def finish(self) -> dict[str, bytes]:
        """The tensors that all have ended with; each has trained each round once."""
        for name, process in self.processes.items():
            assert process.wait(180) == 0, self.log(name)
        assert [sorted(line.weights) for line in history(self._folder / "coordinator")] == [
            list(NODES)
        ] * ROUNDS
        return {
            name: (self._folder / name / "model" / "personal.safetensors").read_bytes()
            for name in NODES
        } | {"coordinator": (self._folder / "coordinator" / "global.safetensors").read_bytes()}


@pytest.fixture
def federation(
    mosquitto: EmbeddedBroker, plants: dict[str, Path], tmp_path: Path
) -> Iterator[Callable[[str], Federation]]:
    begun: list[Federation] = []

    def begin(name: str) -> Federation:
        begun.append(Federation(mosquitto, plants, tmp_path / name))
        return begun[-1]

    yield begin
    for each in begun:
        for process in each.processes.values():
            process.kill()


def test_versions_mix_and_all_are_upgraded_in_turn_without_a_byte_of_difference(
    federation: Callable[[str], Federation], later: dict[str, str]
) -> None:
    ends = []
    for name, coordinator, node in (("new-nodes", THIS, later), ("new-coordinator", later, THIS)):
        mixed = federation(name)
        mixed.start("coordinator", coordinator)
        mixed.start("plant-a", node)
        mixed.start("plant-b", THIS)
        ends.append(mixed.finish())
    rolling = federation("rolling")
    for name in ("coordinator", *NODES):
        rolling.start(name, THIS)
    rolling.reach(2)
    rolling.upgrade("plant-a", later)
    rolling.upgrade("coordinator", later)
    rolling.reach(4)
    rolling.upgrade("plant-b", later)
    assert ends[0] == ends[1] == rolling.finish()


def test_a_node_is_told_of_another_version_of_the_protocol_and_what_to_install(
    federation: Callable[[str], Federation], plants: dict[str, Path], tmp_path: Path
) -> None:
    other = federation("other")
    other.start("coordinator", later_version(tmp_path / "v2", protocol="edge-node/v2"))
    node = run(
        "join",
        other.url,
        "--name",
        "plant-a",
        "--data",
        plants["plant-a"],
        "--state",
        tmp_path / "node",
    )
    assert node.returncode == 2
    assert "edge-node/v2, this node edge-node/v1" in node.stderr
    assert "install the version" in node.stderr
