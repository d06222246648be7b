"""Disks that become full at every durable step of a process in turn: it says so,
and goes on once there is room.

`python -m tests.support.full_disk` tries every step of each kind of process, and prints how each
ended.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import BugError, EdgeNodeError, explain
from tests.support import plants, vfl_runs
from tests.support.threaded_federation import PLANTS, Federation, Session, same
from tests.support.waiting import PATIENCE
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays

Ending = Literal["stopped", "went on", "not reached"]
_SILENCE = 10.0  # seconds that a process whose disk is full may take to end, once it is told
_PRELOAD = "LD_PRELOAD"


class Disk:
    """The disk of one folder, in a process into which full_disk.c is preloaded."""

    def __init__(self, folder: Path):
        self._library, self.folder = ctypes.CDLL(None), folder
        self._step = 0

    def fill_at(self, step: int) -> None:
        """Be full from a step on; 0: never."""
        self._step = step
        self._library.disk_full(os.fsencode(self.folder), ctypes.c_long(step or -1))

    @property
    def steps(self) -> int:
        """How many there were since."""
        return int(self._library.disk_steps())

    @property
    def is_full(self) -> bool:
        """Whether that step was reached."""
        return 0 < self._step <= self.steps


class Parties(Protocol):
    """Those who take part in a run, as threads."""

    names: tuple[str, ...]

    def start(self, name: str) -> None:
        """Start one, for the first time or again."""

    def has_ended(self, name: str) -> bool:
        """Whether it has, in order or not."""

    def end(self, name: str) -> object:
        """Its end; raises what it has ended with."""

    def told(self, name: str) -> str:
        """What it has told."""

    def check(self) -> None:
        """Raise AssertionError unless all have what they have without a fault."""


def attempt(parties: Parties, victim: str, disk: Disk, step: int) -> Ending:
    """Play a run in which the disk of `victim` is full from a step on, until it has said so.

    AssertionError if not.
    """
    disk.fill_at(step)
    ending: Ending = "not reached"
    again: set[str] = set()  # that were started again, as the first party has asked for
    full_since, deadline = None, time.monotonic() + PATIENCE
    for name in parties.names:
        parties.start(name)
    while not all(map(parties.has_ended, parties.names)) or disk.is_full:
        assert time.monotonic() < deadline, {name: parties.told(name) for name in parties.names}
        if disk.is_full:
            full_since = full_since or time.monotonic()
            if parties.has_ended(victim):
                try:
                    parties.end(victim)
                    ending = "went on"
                    disk.fill_at(0)
                except EdgeNodeError as error:
                    _check(error, disk.folder)
                    ending = "stopped"
                    disk.fill_at(0)
                    parties.start(victim)
            elif time.monotonic() > full_since + _SILENCE and str(disk.folder) in parties.told(
                victim
            ):
                ending = "went on"
                disk.fill_at(0)
        for name in parties.names:
            if parties.has_ended(name) and not (name == victim and disk.is_full):
                parties.end(name)
        for name in {
            name
            for name in parties.names
            if f"start {name} again" in parties.told(parties.names[0])
        } - again:
            again.add(name)
            parties.start(name)
        time.sleep(0.01)  # between two looks
    for name in parties.names:
        parties.end(name)
    parties.check()
    return ending


def _check(error: EdgeNodeError, folder: Path) -> None:
    """A message names the folder, the fault and the remedy,
    which is to make room and start again.
    """
    assert not isinstance(explain(error), BugError), repr(error)
    assert str(folder) in str(error), error
    assert "space" in error.remedy, error


class FederationThreads:
    """A coordinator and its nodes."""

    names = ("coordinator", *PLANTS)

    def __init__(self, federation: Federation, expected: Mapping[str, dict[str, object]]):
        self._federation, self._expected = federation, expected
        self._sessions: dict[str, Session] = {}

    def start(self, name: str) -> None:
        coordinates = name == "coordinator"
        self._sessions[name] = (
            self._federation.start_coordinator(60) if coordinates else self._federation.node(name)
        )

    def has_ended(self, name: str) -> bool:
        return self._sessions[name].has_ended()

    def end(self, name: str) -> object:
        return self._sessions[name].end()

    def told(self, name: str) -> str:
        return str(self._sessions[name].all_told())

    def check(self) -> None:
        for name in PLANTS:
            assert same(self._federation.personal(name), self._expected[name]), name  # type: ignore[arg-type]


class VflThreads:
    """A head and its sensors."""

    names = ("head", "press", "oven")
    rounds = 5

    def __init__(self, parties: vfl_runs.Threads, expected: object):
        self._parties, self._expected = parties, expected

    def start(self, name: str) -> None:
        self._parties.start(name)

    def has_ended(self, name: str) -> bool:
        return self._parties.has_ended(name)

    def end(self, name: str) -> object:
        return self._parties.result(name)

    def told(self, name: str) -> str:
        return self._parties.said(name)

    def check(self) -> None:
        assert (
            vfl_runs.left(self._parties.spec, self._parties.folder, self.rounds) == self._expected
        )


Attempt = Callable[[Path, int], Ending]
"""(an empty folder, step; 0: never) -> how a run ended in which a disk was full from that step
on.
"""


def federation(victim: str, folder: Path, url: str) -> Attempt:
    """Attempts on the coordinator or a node."""
    images = {
        name: plants.draw(folder / "plants" / name, 6, seed) for seed, name in enumerate(PLANTS)
    }
    whole = Federation(Endpoint.parse(url), images, folder, "full", 2, Participation())
    models = simulate(
        whole.spec, whole.first, {name: whole.images(name) for name in PLANTS}, compare=True
    ).models
    expected = {name: to_arrays(model.tensors) for name, model in models.items()}

    def run(here: Path, step: int) -> Ending:
        again = Federation(Endpoint.parse(url), images, here, here.name, 2, Participation())
        return attempt(FederationThreads(again, expected), victim, Disk(here / victim), step)

    return run


def vfl(victim: str, folder: Path, url: str) -> Attempt:
    """Attempts on the head or a sensor."""
    spec, data = vfl_runs.vfl_spec(VflThreads.names[1:], seed=11), folder / "data"
    vfl_runs.draw(data, spec.window.span(VflThreads.rounds)[1], 11)
    expected = vfl_runs.simulated(spec, data, VflThreads.rounds)

    def run(here: Path, step: int) -> Ending:
        again = vfl_runs.vfl_spec(VflThreads.names[1:], seed=11)
        with vfl_runs.Threads(again, url, data, here, VflThreads.rounds) as parties:
            return attempt(VflThreads(parties, expected), victim, Disk(here / victim), step)

    return run


KINDS: Mapping[str, tuple[Callable[[str, Path, str], Attempt], str]] = {
    "coordinator": (federation, "coordinator"),
    "node": (federation, "plant-b"),
    "VFL head": (vfl, "head"),
    "VFL sensor": (vfl, "oven"),
}


def campaign(kind: str, most: int | None) -> tuple[int, Counter[Ending]]:
    """Try every step, or `most` of them that the kind draws.

    Returns how many there are, and the endings.

    AssertionError names the step.
    """
    make, victim = KINDS[kind]
    with (
        tempfile.TemporaryDirectory() as name,
        start_broker(Path(name) / "broker", kind="mosquitto") as running,
    ):
        folder = Path(name)
        run = make(victim, folder, running.url)
        assert run(folder / "full-0", 0) == "not reached"
        count = ctypes.CDLL(None).disk_steps()
        steps = range(1, count + 1)
        endings: Counter[Ending] = Counter()
        for step in steps if most is None else sorted(random.Random(kind).sample(steps, most)):
            try:
                endings[run(folder / f"full-{step}", step)] += 1
            except (AssertionError, EdgeNodeError) as error:
                raise AssertionError(
                    f"{kind}, disk full at step {step} of {count}: {error}"
                ) from error
    return count, endings


def main() -> int:
    """Try all; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.full_disk", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all, if none is named")
    parser.add_argument("--most", type=int, help="steps of each; all, if not given")
    given = parser.parse_args()
    if _PRELOAD not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "full_disk.so"
            source = Path(__file__).with_suffix(".c")
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True
            )
            command = [sys.executable, "-m", "tests.support.full_disk", *sys.argv[1:]]
            return subprocess.run(
                command, env={**os.environ, _PRELOAD: str(library)}, check=False
            ).returncode
    print(
        "| disk of | durable steps | tried | stopped, went on with room | went on "
        "|\n|---|---:|---:|---:|---:|"
    )
    for kind in given.kinds or KINDS:
        count, endings = campaign(kind, given.most)
        figures = (
            count,
            endings.total(),
            endings["stopped"],
            endings["went on"] + endings["not reached"],
        )
        print(f"| {kind} | {' | '.join(map(str, figures))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
