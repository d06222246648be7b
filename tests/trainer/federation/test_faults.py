"""Full and read-only disks, clocks that jump, and two where one should be: clear errors,
and nothing is lost.

Once the fault is gone, the same command goes on and ends with the bytes of an undisturbed
federation.
"""

import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.numpy import load_file

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode
from broker_config.protocol.messages import Spec
from tests.support.foreign_node import Tensors
from tests.support.frame_mutation import small_weights
from tests.support.live_attack import Gate, Honest
from tests.support.memory_limit import take_memory
from tests.support.plants import CLASSES, Process, draw, start
from tests.support.waiting import PATIENCE, wait_until

ROUNDS = 3
root = pytest.mark.needs("root")  # only root can mount a file system


class Disk:
    """A folder on a disk that can become full or read-only under a process."""

    def __init__(self, folder: Path):
        self.folder = folder

    def fill(self, process: Process) -> None:
        """No file of the process may grow beyond 50 kB any more."""
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    def free(self) -> None:
        """The limit was the process's."""


class Mounted(Disk):
    """A file system of its own."""

    def fill(self, process: Process) -> None:
        """No byte is left."""
        with (self.folder / "junk").open("wb", buffering=0) as junk:
            try:
                while junk.write(bytes(4096)):
                    pass
            except OSError:
                pass

    def free(self) -> None:
        (self.folder / "junk").unlink()

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", self.folder], check=True)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    yield Mounted(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(params=["limited", pytest.param("mounted", marks=root)])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return request.getfixturevalue("mounted") if request.param == "mounted" else Disk(tmp_path)


class Federation:
    """A coordinator's processes, one after the other,
    and two light nodes that wait at a gate in each round.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, lights: str = "ab"):
        self.broker, self.folder, self.gate = broker, folder, Gate()
        self.results: dict[str, Tensors] = {}
        self.processes: list[Process] = []
        self._weights = small_weights(folder / "weights")
        self.join(lights)

    def join(self, lights: str) -> None:
        for number, name in enumerate(lights):
            node = Honest(self.broker.port, name, self.gate, shift=0.25 + number)
            threading.Thread(target=self._take_part, args=(node,), daemon=True).start()

    def _take_part(self, node: Honest) -> None:
        self.results[node.name] = node.run()

    def coordinator(
        self, state: Path, log: str, *flags: object, module: str = "tests.support.small_chunks"
    ) -> Process:
        arguments = (
            "coordinate",
            self.broker.url,
            "--json",
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--model",
            "small",
            "--size",
            32,
            "--method",
            "fedavg",
            "--rounds",
            ROUNDS,
            "--seed",
            7,
            "--linger",
            5,
            "--training",
            "local_epochs=1",
            "--weights",
            self._weights,
            "--state",
            state,
            *flags,
        )
        return self._start(arguments, log, module)

    def node(self, name: str, state: Path, images: Path, log: str) -> Process:
        return self._start(
            ("join", self.broker.url, "--name", name, "--data", images, "--state", state), log
        )

    def _start(self, arguments: tuple[object, ...], log: str, module: str = "edge_node") -> Process:
        self.processes.append(start(*arguments, log=self.folder / log, module=module))
        return self.processes[-1]

    def said(self, log: str) -> str:
        return (self.folder / log).read_text()

    def reaches(self, round_: int, process: Process, log: str) -> None:
        """The coordinator has opened the round, and no light node has contributed to it."""
        self.gate.open(round_ - 1)
        opened = f'{{"event":"RoundOpened","round":{round_}}}'
        wait_until(lambda: process.poll() is not None or opened in self.said(log))
        assert process.poll() is None, self.said(log)

    def fails(self, process: Process, log: str, code: int = 1) -> str:
        """The process ends by itself, and says what to do. Returns what it said, in one line."""
        assert process.wait(PATIENCE) == code, self.said(log)
        said = self.said(log)
        assert "What to do: " in said
        assert "bug" not in said
        return said

    def ends(self, process: Process, log: str) -> Tensors:
        """All rounds are done. Returns what the light nodes have got."""
        self.gate.open(ROUNDS)
        assert process.wait(PATIENCE) == 0, self.said(log)
        wait_until(lambda: len(self.results) > 0)
        return next(iter(self.results.values()))

    def close(self) -> None:
        self.gate.open(ROUNDS)
        for process in self.processes:
            process.kill()
            process.wait()


def clone(process: Process, state: Path, copy: Path) -> None:
    """Copy the folder of a process as a virtual machine is copied: nothing changes meanwhile."""
    process.send_signal(signal.SIGSTOP)
    wait_until(
        lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    )
    shutil.copytree(state, copy)
    process.send_signal(signal.SIGCONT)


def retained_run(broker: EmbeddedBroker) -> str:
    """The run that nodes find."""
    topic = topics.spec("default")
    return decode(read_retained(Endpoint.parse(broker.url), [topic], wait=5)[topic], Spec).run


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[name].tobytes() == right[name].tobytes() for name in left
    )


@pytest.fixture
def federation(mosquitto: EmbeddedBroker, tmp_path: Path) -> Iterator[Federation]:
    with closing(Federation(mosquitto, tmp_path)) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """The result of two light nodes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with (
        start_broker(folder / "broker", kind="mosquitto") as broker,
        closing(Federation(broker, folder)) as made,
    ):
        return made.ends(made.coordinator(folder / "state", "log"), "log")


# Disks


@pytest.mark.slow
def test_a_coordinator_whose_disk_is_full_stops_and_goes_on_when_there_is_room(
    federation: Federation, disk: Disk, undisturbed: Tensors
) -> None:
    state = disk.folder / "state"
    coordinator = federation.coordinator(state, "first")
    federation.reaches(2, coordinator, "first")
    disk.fill(coordinator)
    federation.gate.open(2)
    assert str(state) in federation.fails(coordinator, "first")
    disk.free()
    assert same(federation.ends(federation.coordinator(state, "second"), "second"), undisturbed)
    assert '"RoundOpened","round":1}' not in federation.said("second")


@pytest.mark.slow
def test_a_coordinator_that_gets_no_more_memory_says_so_and_goes_on_with_more(
    federation: Federation, undisturbed: Tensors, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    coordinator = federation.coordinator(state, "first")
    federation.reaches(2, coordinator, "first")
    take_memory(coordinator.pid)
    federation.gate.open(2)
    said = federation.fails(coordinator, "first")
    assert "memory or processes" in said
    assert "Traceback" not in said
    assert same(federation.ends(federation.coordinator(state, "second"), "second"), undisturbed)


class Ends(NamedTuple):
    """What a light node and a real one have got."""

    light: Tensors
    personal: Tensors

    def same(self, other: "Ends") -> bool:
        return same(self.light, other.light) and same(self.personal, other.personal)


def with_a_node(folder: Path, state: Path, disk: Disk | None) -> Ends:
    """A federation of the light node b and a real one, a,
    whose disk may become full in the second round.
    """
    images = draw(folder / "images", 8, seed=3)
    with (
        start_broker(folder / "broker", kind="mosquitto") as broker,
        closing(Federation(broker, folder, "b")) as federation,
    ):
        coordinator = federation.coordinator(folder / "state", "log")
        node = federation.node("a", state, images, "node")
        if disk:
            federation.reaches(2, coordinator, "log")
            disk.fill(node)
            # it may have done all of its part already: then the next round finds the disk full
            federation.gate.open(2)
            assert str(state) in federation.fails(node, "node")
            disk.free()
            node = federation.node("a", state, images, "again")
        light = federation.ends(coordinator, "log")
        assert node.wait(PATIENCE) == 0
    return Ends(light, load_file(state / "model" / "personal.safetensors"))


@pytest.fixture(scope="module")
def undisturbed_node(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    folder = tmp_path_factory.mktemp("undisturbed-node")
    return with_a_node(folder, folder / "a", None)


@pytest.mark.slow
def test_a_node_whose_disk_is_full_stops_and_goes_on_when_there_is_room(
    undisturbed_node: Ends, tmp_path: Path
) -> None:
    assert with_a_node(tmp_path, tmp_path / "a", Disk(tmp_path)).same(undisturbed_node)


@pytest.mark.slow
@root
def test_a_read_only_state_folder_is_named_and_the_run_goes_on_when_it_can_be_written(
    federation: Federation, mounted: Mounted, undisturbed: Tensors, tmp_path: Path
) -> None:
    state, images = mounted.folder / "state", draw(tmp_path / "images", 4, seed=3)
    coordinator = federation.coordinator(state, "first")
    federation.reaches(2, coordinator, "first")
    coordinator.terminate()
    assert coordinator.wait(PATIENCE) == 130
    mounted.remount("ro")
    assert str(state) in federation.fails(federation.coordinator(state, "second"), "second")
    other = mounted.folder / "node"
    assert str(other) in federation.fails(federation.node("c", other, images, "node"), "node")
    mounted.remount("rw")
    assert same(federation.ends(federation.coordinator(state, "third"), "third"), undisturbed)


# Clocks


@pytest.mark.slow
def test_a_clock_that_jumps_by_years_changes_nothing(
    federation: Federation, undisturbed: Tensors
) -> None:
    state = federation.folder / "state"
    coordinator = federation.coordinator(
        state,
        "log",
        "--deadline",
        3600,
        "--sample",
        2,
        "--quorum",
        1,
        module="tests.support.jumping_clock",
    )
    assert same(federation.ends(coordinator, "log"), undisturbed)
    assert federation.said("log").count('"contributors":["a","b"]') == ROUNDS


# Two where one should be


def test_of_two_coordinators_that_start_at_once_one_goes_on(
    mosquitto: EmbeddedBroker, undisturbed: Tensors, tmp_path: Path
) -> None:
    with closing(Federation(mosquitto, tmp_path, "")) as federation:
        both = {
            log: federation.coordinator(tmp_path / f"state-{log}", log)
            for log in ("first", "second")
        }
        wait_until(lambda: any(each.poll() is not None for each in both.values()))
        (ended,) = [log for log, each in both.items() if each.poll() is not None]
        assert "already has a coordinator" in federation.fails(both.pop(ended), ended, code=2)
        ((log, remaining),) = both.items()
        wait_until(lambda: retained_run(mosquitto) in federation.said(log))
        federation.join("ab")
        assert same(federation.ends(remaining, log), undisturbed)


def test_a_second_coordinator_on_one_state_folder_names_the_first(
    federation: Federation, undisturbed: Tensors
) -> None:
    state = federation.folder / "state"
    first = federation.coordinator(state, "first")
    federation.reaches(2, first, "first")
    second = federation.coordinator(state, "second", "--federation", "another")
    assert f"is used by process {first.pid}" in federation.fails(second, "second", code=2)
    assert same(federation.ends(first, "first"), undisturbed)


@pytest.mark.slow
def test_a_copy_of_a_running_coordinator_is_refused_and_expels_nobody(
    federation: Federation, undisturbed: Tensors
) -> None:
    original, copy = federation.folder / "original", federation.folder / "copy"
    first = federation.coordinator(original, "first")
    federation.reaches(2, first, "first")
    clone(first, original, copy)
    federation.reaches(3, first, "first")
    second = federation.coordinator(copy, "second")
    assert "already has a coordinator" in federation.fails(second, "second", code=2)
    assert same(federation.ends(first, "first"), undisturbed)
    assert "NodeRefused" not in federation.said("first")


@pytest.mark.slow
def test_a_second_node_of_one_name_or_one_state_folder_is_refused_and_the_first_finishes(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    images, state = draw(tmp_path / "images", 8, seed=3), tmp_path / "node"
    with closing(Federation(mosquitto, tmp_path, "b")) as federation:
        coordinator = federation.coordinator(tmp_path / "state", "log")
        first = federation.node("a", state, images, "first")
        federation.reaches(2, coordinator, "log")
        clone(first, state, tmp_path / "copy")
        others = {
            "same-folder": state,
            "same-name": tmp_path / "other",
            "copied-folder": tmp_path / "copy",
        }
        processes = [federation.node("a", folder, images, log) for log, folder in others.items()]
        said = [
            federation.fails(each, log, code=2) for each, log in zip(processes, others, strict=True)
        ]
        assert f"is used by process {first.pid}" in said[0]
        assert "taken" in said[1]
        assert "taken" in said[2]
        federation.ends(coordinator, "log")
        assert first.wait(PATIENCE) == 0
