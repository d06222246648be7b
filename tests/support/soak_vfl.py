"""A VFL run for long, under kill -9 and restarts of the broker: `python -m
tests.support.soak_vfl` prints the outcome.

A feeder appends products to the files of the sensors and the head while the run goes over a sliding
window. In the first part of the rounds every process is killed again and again: half the time at
random moments, else in the middle of a chosen step. In the rest only the broker is restarted, and
memory is measured. In the end no round may be lost, all tensors must be those of the same run in
one process, no kill may have cost more than `commit` rounds, and no process may have grown.
"""

import argparse
import itertools
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from broker_config.protocol.errors import BrokerError
from edge_node.extensions.vfl.messages import VflSpec, Window
from edge_node.extensions.vfl.server.journal import history
from tests.support.mosquitto import Mosquitto
from tests.support.vfl_processes import STARTING, STEPS, WAITING, WatchedProcess
from tests.support.vfl_sensor_files import CLASSES, Plant, Processes, simulated

HEAD = "coordinator"
SENSORS = ("press", "oven")
WINDOW, CHUNK, ITERATIONS, COMMIT = 64, 2, 1, 20
FIRE = 0.2  # of the rounds in which processes are killed
WARM = 0.5  # of the rounds after which memory must be level: sensors keep 10,000 rows
DRIFT = 0.02  # how much memory may grow
AHEAD = 400  # rounds whose products the feeder has written, at most
PAUSE = (0.2, 3.0)  # seconds between two kills, from the moment on when rounds are closed again
BROKER_EVERY = 20.0  # seconds between two restarts of the broker once nobody is killed any more
STUCK = 120.0  # seconds without a round
TRY = 3.0  # seconds for a chosen step to come
BUSY = {  # steps in the middle of which somebody is killed
    HEAD: (
        "representing",
        "learning as head",
        "writing a checkpoint",
        "writing the journal",
        "sending",
    ),
    "sensor": ("reading rows", "embedding", "learning", "writing a checkpoint", "sending"),
}


class Kill(NamedTuple):
    """One that has happened."""

    victim: str
    step: str  # what the victim was doing
    round: int  # the last that the head had closed


class Soak:
    """The run in `folder`, its feeder, and those who disturb it."""

    def __init__(self, folder: Path, rounds: int, kills: int, seed: int):
        self.rounds, self.kills, self.done = rounds, kills, list[Kill]()
        self.broker_restarts = 0
        self._folder, self._chance = folder, random.Random(seed)
        self._plant = Plant(folder / "plant", SENSORS, seed)
        self._broker = Mosquitto(folder / "broker", persistence=False)
        settings = {
            "--start": WINDOW,
            "--window": WINDOW,
            "--chunk": CHUNK,
            "--iterations": ITERATIONS,
            "--commit": COMMIT,
            "--rounds": rounds,
            "--seed": seed,
            "--federation": "default",
            "--network": "dense",
            "--policy": "all",
        }
        self._line = Processes(folder, self._plant, self._broker.url, settings)
        self._processes = {name: WatchedProcess(folder, name) for name in (HEAD, *SENSORS)}
        self.memory: dict[str, list[int]] = {name: [] for name in self._processes}
        self._seed, self._moved, self._round, self._at = seed, time.monotonic(), 0, 0

    def run(self) -> None:
        """To the end."""
        with ExitStack() as stack:
            self._broker.start()
            stack.callback(self._broker.kill)
            stack.callback(self._plant.close)
            stack.callback(lambda: [each.kill() for each in self._processes.values()])
            self._plant.feed(WINDOW)
            for name in self._processes:
                self._start(name)
            next_kill, next_restart, next_look = time.monotonic() + 5, 0.0, 0.0
            while any(each.ended is None for each in self._processes.values()):
                now = time.monotonic()
                self._feed()
                self._check_alive()
                if len(self.done) < self.kills:
                    if (
                        now > next_kill
                        and self._round >= len(self.done) * FIRE * self.rounds / self.kills
                    ):
                        self._kill()
                        next_kill = time.monotonic() + self._chance.uniform(*PAUSE)
                elif now > next_restart:
                    self._restart_broker()
                    next_restart = now + BROKER_EVERY
                if now > next_look and self._round > WARM * self.rounds:
                    self._note_memory()
                    next_look = now + 0.5
                time.sleep(0.01)  # between two looks

    def _start(self, name: str) -> None:
        self._processes[name].start(self._line.words(name))

    def _feed(self) -> None:
        """Append the products that rounds will soon need, in pieces of any size."""
        learnt = self._processes[HEAD].last
        if learnt != self._round:
            self._round, self._moved = learnt, time.monotonic()
        wanted = WINDOW + CHUNK * min(self.rounds, self._round + AHEAD)
        if self._plant.products < wanted and self._chance.random() < 0.5:
            self._plant.feed(
                min(self._chance.randint(1, 50 * CHUNK), wanted - self._plant.products)
            )

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            said = process.log.read_text()[-2000:] if process.log.exists() else ""
            assert time.monotonic() < self._moved + STUCK, f"stuck in round {self._round}: {said}"
            if process.ended == BrokerError.exit_code:  # it was started while there was no broker
                self._start(name)
            assert process.ended in (None, 0), f"{name} ended: {process.ended}\n{said}"

    def _kill(self) -> None:
        """Kill somebody and start it again; now and then the broker."""
        victim = self._chance.choice((HEAD, HEAD, *SENSORS, self._broker.name))
        if victim == self._broker.name:
            self._restart_broker()
            self.done.append(Kill(victim, WAITING, self._round))
            return
        process = self._processes[victim]
        if self._chance.random() < 0.7:
            wanted = self._chance.choice(BUSY.get(victim, BUSY["sensor"]))
            deadline = time.monotonic() + TRY
            while process.step != wanted and time.monotonic() < deadline:
                pass
        process.kill()
        self.done.append(Kill(victim, process.step, self._round))
        self._start(victim)

    def _restart_broker(self) -> None:
        self._broker.kill()
        time.sleep(self._chance.uniform(0, 0.5))  # that it is away
        self._broker.start()
        self.broker_restarts += 1

    def _note_memory(self) -> None:
        for name, process in self._processes.items():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                status = Path(f"/proc/{process.pid}/status").read_text()
                self.memory[name] += [
                    int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")
                ]

    # What must have come out

    def complaints(self) -> Iterator[str]:
        """All that is not as it must be."""
        closed = [each.round for each in history(self._line.state(HEAD))]
        if closed != list(range(1, self.rounds + 1)):
            yield (
                f"{len(closed)} rounds are in the journal, from {closed[:1]} to {closed[-1:]}, "
                f"not {self.rounds}"
            )
        for name, lost in self.replayed().items():
            if max(lost, default=0) > COMMIT:
                yield f"{name} played {max(lost)} rounds again after one kill"
        for name, growth in self.growth().items():
            if growth > DRIFT:
                yield f"{name} has grown by {100 * growth:.1f} %"
        yield from self._differing()

    def replayed(self) -> dict[str, list[int]]:
        """Rounds that each process has played again, for each time that it went back."""
        found = {}
        for name, process in self._processes.items():
            rounds = process.rounds
            found[name] = [
                last - then + 1 for last, then in itertools.pairwise(rounds) if then <= last
            ]
        return found

    def growth(self) -> dict[str, float]:
        """Of the median of the last third over that of the first, after the warm-up."""
        grown = {}
        for name, seen in self.memory.items():
            third = max(1, len(seen) // 3)
            grown[name] = (
                statistics.median(seen[-third:]) / statistics.median(seen[:third]) - 1
                if seen
                else 0.0
            )
        return grown

    def _differing(self) -> Iterator[str]:
        """Tensors that are not those of the undisturbed run."""
        spec = VflSpec(
            federation="default",
            run="0" * 16,
            software="",
            sensors=SENSORS,
            network="dense",
            classes=CLASSES,
            window=Window(start=WINDOW, chunk=CHUNK, size=WINDOW),
            iterations=ITERATIONS,
            seed=self._seed,
        )
        torch.set_num_threads(1)
        simulation = simulated(spec, self._plant)
        for _ in range(self.rounds):
            simulation.step([ITERATIONS] * len(SENSORS))
        models = {HEAD: simulation.head.model} | {
            each.name: each.model for each in simulation.sensors
        }
        for name, model in models.items():
            path = max(self._line.state(name).glob("*/[0-9]*.safetensors"))
            if int(path.name[:12]) != self.rounds:
                yield f"the last checkpoint of {name} is of round {int(path.name[:12])}"
            kept = load_file(path)
            for tensor, value in model.state_dict().items():
                ours = [each for key, each in kept.items() if key.endswith(tensor)]
                if not any(torch.equal(each, value) for each in ours):
                    yield f"{tensor} of {name} is not as undisturbed"


def histogram(kills: Sequence[Kill]) -> list[str]:
    """What was being done when somebody was killed."""
    counts = Counter(
        (kill.step, HEAD if kill.victim == HEAD else "sensor")
        for kill in kills
        if kill.victim != "broker"
    )
    steps = sorted({step for step, _ in counts}, key=[*STEPS, WAITING, STARTING].index)
    lines = [f"{'killed while':<24}{'head':>8}{'a sensor':>10}"]
    return lines + [
        f"{step:<24}{counts[step, HEAD]:>8}{counts[step, 'sensor']:>10}" for step in steps
    ]


def main() -> int:
    """Run it; 0 if the promise was kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-vfl-"))
    soak, started = Soak(folder, given.rounds, given.kills, given.seed), time.monotonic()
    soak.run()
    seconds = time.monotonic() - started
    print(
        f"{given.rounds} rounds in {seconds:.0f} s; {len(soak.done)} kills; "
        f"{soak.broker_restarts} restarts of broker"
    )
    print("\n".join(histogram(soak.done)))
    for name, lost in soak.replayed().items():
        print(
            f"{name}: went back {len(lost)} times, by {max(lost, default=0)} rounds at most, "
            f"{sum(lost)} in all"
        )
    for name, growth in soak.growth().items():
        print(
            f"{name}: {statistics.median(soak.memory[name][-5:] or [0]) / 1024:.1f} MiB, "
            f"{100 * growth:+.2f} %"
        )
    failed = list(soak.complaints())
    for complaint in failed:
        print(f"FAILED: {complaint}")
    if failed:
        print(f"everything is kept in {folder}")
    else:
        print("no round is lost, and all tensors are those of an undisturbed run, byte for byte")
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
