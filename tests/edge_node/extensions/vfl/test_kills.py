"""Killed heads and sensors: the run goes on, and learns the same to the last bit."""

import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from broker_config.broker.embedded import start_broker
from edge_node.cli.main import main
from edge_node.extensions.vfl.messages import Recipe
from edge_node.extensions.vfl.server.journal import Journal, runs
from tests.support.vfl_processes import FORK
from tests.support.vfl_runs import CLASSES, COLUMNS, draw, feed, left, simulated, vfl_spec, written
from tests.support.waiting import wait_until

SENSORS = ("press", "oven")


def _run(words: Sequence[str], log: Path) -> None:
    """`edge-node` in a process of its own."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["edge-node", *words]
    main()


PACE = ("--chunk", 4, "--window", 24)


class Processes:
    """A head and its sensors, over one broker."""

    def __init__(self, url: str, folder: Path, data: Path, seed: int, *more: object):
        self.folder, self._url, self._data, self._seed, self.more = folder, url, data, seed, more
        self.running: dict[str, BaseProcess] = {}
        self._starts = 0

    def start(self, *parties: str) -> None:
        """Start these parties, for the first time or again."""
        for party in parties:
            self._starts += 1
            log = self.folder / f"{party}-{self._starts}.log"
            words = [str(each) for each in (*self._words(party), "--state", self.folder / party)]
            self.running[party] = process = FORK.Process(target=_run, args=(words, log))
            process.start()

    def _words(self, party: str) -> tuple[object, ...]:
        if party != "head":
            columns = ",".join(COLUMNS[party])
            return (
                "vfl",
                "join",
                self._url,
                "--sensor",
                party,
                "--columns",
                columns,
                "--data",
                self._data / f"{party}.csv",
            )
        return (
            "vfl",
            "coordinate",
            self._url,
            "--sensors",
            ",".join(SENSORS),
            "--labels",
            self._data / "labels.csv",
            "--classes",
            ",".join(CLASSES),
            "--start",
            20,
            "--commit",
            3,
            "--policy",
            "all",
            "--patience",
            1,
            "--seed",
            self._seed,
            *self.more,
        )

    def kill(self, party: str) -> None:
        """Kill -9, and wait until it is dead."""
        self.running[party].kill()
        self.running[party].join()

    def reach(self, round_: int) -> None:
        """Wait until all have written down a round."""
        wait_until(
            lambda: all(written(self.folder / party) >= round_ for party in self.running),
            meanwhile=lambda: all(process.is_alive() for process in self.running.values()),
            said=self.logs,
        )

    def end(self) -> None:
        """Wait until all have ended in order."""
        for process in self.running.values():
            process.join(60)
        assert [process.exitcode for process in self.running.values()] == [0] * len(self.running), (
            self.logs()
        )

    def logs(self) -> str:
        """What all have said."""
        return "\n".join(
            f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("*.log"))
        )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        yield running.url


def test_the_steps_of_a_round_together_are_as_long_whatever_their_number(
    broker: str, tmp_path: Path
) -> None:
    """Where nobody has said how long a step is."""
    draw(tmp_path / "data", 20, seed=0)
    parties = Processes(broker, tmp_path, tmp_path / "data", 0, "--batches", 10, "--iterations", 4)
    parties.start("head")
    try:
        wait_until(
            lambda: (tmp_path / "head" / Journal.FILE).exists() and bool(runs(tmp_path / "head")),
            said=parties.logs,
        )
    finally:
        parties.kill("head")
    [begun] = runs(tmp_path / "head")
    assert begun.spec.recipe == Recipe(eta=0.01, batches=10)  # 0.4 in all


def test_a_sensor_and_the_head_that_are_killed_change_no_byte(broker: str, tmp_path: Path) -> None:
    """With products that arrive during the run; each kill costs rounds that are replayed.

    The head that goes on is not told its pace, which is not the default of this version.
    """
    whole, data, seed = tmp_path / "whole", tmp_path / "data", 5
    spec = vfl_spec(SENSORS, seed=seed, recipe=Recipe(eta=0.03))
    draw(whole, spec.window.span(20)[1], seed)
    feed(whole, data, spec.window.span(8)[1])
    parties = Processes(
        broker, tmp_path, data, seed, *PACE, "--rounds", 20, "--eta", spec.recipe.eta
    )
    try:
        parties.start("head", *SENSORS)
        parties.reach(6)
        parties.kill("oven")
        parties.start("oven")
        feed(whole, data, spec.window.span(14)[1])
        parties.reach(12)
        parties.kill("head")
        feed(whole, data, spec.window.span(20)[1])
        parties.more = ("--rounds", 20)
        parties.start("head")
        parties.end()
    finally:
        for process in parties.running.values():
            process.kill()
    assert left(spec, tmp_path, 20) == simulated(spec, whole, 20)
