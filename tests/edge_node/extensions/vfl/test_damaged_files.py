"""Every file of head and sensors, damaged: the run goes on to the same bytes,
or a message names file and remedy.
"""

import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_config.broker.embedded import start_broker
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.server.spec import new_run_id
from tests.support.damaged_files import FAULTS, RECOVERED, Case, Outcome, Snapshot, try_all, unknown
from tests.support.vfl_runs import Threads, draw, feed, left, simulated, vfl_spec, written
from tests.support.waiting import wait_until
from trainer import progress

SENSORS, ROUNDS, BEFORE = ("press", "oven"), 10, 8
KNOWN = (
    "head/events.jsonl",
    "head/vfl.sqlite",
    "head/vfl.sqlite-journal",  # of a transaction that the kill has cut off
    "*/*.tmp",
    "*/*/*.tmp",
    *(
        f"*/{each}"
        for each in (
            "lock",
            "identity*.json",
            "spec.json",
            "runs*.json",
            "*/????????????-*.safetensors",
        )
    ),
)


def _live(*arguments: Any) -> None:
    """All parties in one process, which is killed."""
    with Threads(*arguments) as parties:
        parties.start("head", *SENSORS)
        parties.end()


class Killed:
    """A federation that was killed in its last rounds, with an older copy of its folders."""

    def __init__(self, folder: Path, url: str):
        self.spec: VflSpec = vfl_spec(SENSORS, seed=11)
        self._folder, self.url, self._data, self._scratch = (
            folder,
            url,
            folder / "data",
            folder / "scratch",
        )
        self.whole = folder / "whole"
        draw(self.whole, self.spec.window.span(ROUNDS)[1], 11)
        feed(self.whole, self._data, self.spec.window.span(BEFORE)[1])
        self.snapshot = Snapshot(folder / "newer", folder / "older")
        self._run_until(3)
        shutil.copytree(self.snapshot.newer, self.snapshot.older)
        self._run_until(6)
        feed(self.whole, self._data, self.spec.window.span(ROUNDS)[1])
        self.expected = simulated(self.spec, self._data, ROUNDS)

    def _run_until(self, round_: int) -> None:
        arguments = (self.spec, self.url, self._data, self.snapshot.newer, ROUNDS)
        process = multiprocessing.get_context("forkserver").Process(target=_live, args=arguments)
        process.start()
        wait_until(
            lambda: all(
                written(self.snapshot.newer / party) >= round_ for party in ("head", *SENSORS)
            ),
            meanwhile=process.is_alive,
        )
        process.kill()
        process.join()

    def start(self, folder: Path, commands: str = "") -> Outcome:
        run, new = new_run_id(), "--new" in commands
        spec = (
            msgspec.structs.replace(self.spec, run=run, federation=f"vfl-{run}")
            if new
            else self.spec
        )
        with Threads(spec, self.url, self._data, folder, ROUNDS, new=new) as parties:
            parties.start("head", *SENSORS)
            parties.end()
        assert left(spec, folder, ROUNDS) == self.expected
        return RECOVERED

    def try_all(self, cases: list[Case]) -> dict[Case, Outcome]:
        return try_all("head and sensors of VFL", self.snapshot, cases, self.start, self._scratch)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield Killed(tmp_path_factory.mktemp("vfl"), running.url)


@pytest.mark.slow
def test_every_file_is_of_a_known_kind(killed: Killed) -> None:
    assert unknown(killed.snapshot.files(), KNOWN) == []
    assert not any(killed.snapshot.newer.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_each_file_ends_well(fault: str, killed: Killed) -> None:
    cases = [case for case in killed.snapshot.cases() if case.fault == fault]
    outcomes = killed.try_all(cases)
    assert outcomes.keys() == {*cases}


@pytest.mark.slow
@pytest.mark.parametrize("party", ["head", *SENSORS])
def test_a_state_folder_restored_from_an_older_copy_goes_on_to_the_same_bytes(
    party: str, killed: Killed, tmp_path: Path
) -> None:
    folder = killed.snapshot.copy([], tmp_path / "all")
    shutil.rmtree(folder / party)
    shutil.copytree(killed.snapshot.older / party, folder / party)
    killed.start(folder)


@pytest.mark.slow
def test_sensors_that_never_stopped_go_back_with_a_head_of_an_older_copy(
    killed: Killed, tmp_path: Path
) -> None:
    folder, data = killed.snapshot.copy([], tmp_path / "all"), tmp_path / "data"
    feed(killed.whole, data, killed.spec.window.span(BEFORE)[1])
    with Threads(killed.spec, killed.url, data, folder, ROUNDS) as parties:
        parties.start("head", *SENSORS)
        joined = [progress.NodeJoined(node=name) for name in SENSORS]
        parties.until(lambda: all(each in parties.events["head"] for each in joined))
        parties.stop("head")
        shutil.rmtree(folder / "head")
        shutil.copytree(killed.snapshot.older / "head", folder / "head")
        feed(killed.whole, data, killed.spec.window.span(ROUNDS)[1])
        parties.start("head")
        parties.end()
    assert left(killed.spec, folder, ROUNDS) == killed.expected
