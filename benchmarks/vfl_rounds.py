"""Rounds of a vertical federation, against a bare client that moves equal frames,
and against one process.

    python -m benchmarks.vfl_rounds --sensors 2 --window 64 --iterations 1 --commit 1 20 200

The run is made of real processes at a mosquitto on this machine. The bare client has as many
processes: one publishes what a head sends in a round, each of the others answers with what a sensor
sends, and the first waits for all of them. Compute is the longest way through the round's
arithmetic, or all of it shared by the cores, whichever is longer. What the run takes beyond both is
its protocol's: checks, copies, signatures, files. The three are measured one after the other,
several times, and their medians are compared. All are in milliseconds a round: means, in which a
commit's fsync is spread over its group of rounds. `cpu` is processor time of all parties together.
On a machine that does other things besides, rounds mostly wait for a core: `--alone` measures them
as if it did not.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import paho.mqtt.client as paho
import torch
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from broker_config.security.kit import Kit
from edge_node.extensions.vfl.frames import encode_frame
from edge_node.extensions.vfl.messages import Recipe, VflSpec, Window
from edge_node.extensions.vfl.server.journal import history
from edge_node.extensions.vfl.simulation import Simulation, release
from edge_node.extensions.vfl.tensor_frames import (
    embedding_frames,
    opening_frames,
    representation_frames,
)
from tests.support.mosquitto import Mosquitto
from tests.support.provisioned_federation import guarded
from tests.support.vfl_sensor_files import CLASSES, Plant, Processes, simulated

WARM = 0.2  # of the rounds, which do not count
PATIENCE = 120.0  # seconds for a run
_FORK = multiprocessing.get_context("fork")


class Case(NamedTuple):
    """One setting of a run."""

    sensors: int
    window: int  # products
    chunk: int  # new products a round
    iterations: int  # E
    commit: int  # rounds
    kits: bool  # certificates and signatures
    alone: bool  # before all other work of the machine

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sensors."""
        return tuple(f"sensor-{number + 1}" for number in range(self.sensors))

    @property
    def spec(self) -> VflSpec:
        """As the head would announce it."""
        return VflSpec(
            federation="steel",
            run="0" * 16,
            software="",
            sensors=self.names,
            network="dense",
            classes=CLASSES,
            window=Window(start=self.window, chunk=self.chunk, size=self.window),
            recipe=Recipe(),
            iterations=self.iterations,
            commit=self.commit,
        )


class Broker(NamedTuple):
    """A broker, and what its members need."""

    url: str
    port: int
    kits: Mapping[str, tuple[Path, str]]
    members: Mapping[str, Kit]


class Cost(NamedTuple):
    """Of a round, milliseconds."""

    wall: float
    cpu: float  # of all parties

    @classmethod
    def per_round(cls, rounds: Sequence[float], cpu: float) -> "Cost":
        """From the seconds of each round, after the first ones,
        and milliseconds of processor time a round.
        """
        counted = rounds[int(WARM * len(rounds)) :]
        return cls(1000 * statistics.fmean(counted), cpu)


@contextlib.contextmanager
def broker(case: Case, folder: Path) -> Iterator[Broker]:
    """A mosquitto, which with kits is as `edge-node provision` configures it."""
    if not case.kits:
        plain = Mosquitto(folder / "broker", persistence=False)
        plain.start()
        try:
            yield Broker(plain.url, plain.port, {}, {})
        finally:
            plain.kill()
        return
    with guarded(folder / "steel", nodes=case.names) as strict:
        kits = {
            name: (strict.folder / "kits" / f"{name}.kit", strict.members.passphrase(name))
            for name in strict.kits
        }
        yield Broker(strict.url, strict.members.registry.port, kits, strict.kits)


def put_first(case: Case) -> None:
    """Let this process and its children have a core before all else on this machine,
    if the case is so.
    """
    if case.alone:
        for thread in threads():
            os.sched_setscheduler(thread, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def threads() -> Iterator[int]:
    """Theirs."""
    children = {
        pid
        for each in Path("/proc/self/task").glob("*/children")
        for pid in each.read_text().split()
    }
    for pid in children | {"self"}:
        yield from (int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir())


def cpu(processes: Iterable[int]) -> float:
    """Milliseconds that these have computed so far."""
    ticks = 0
    for each in processes:
        # it has ended: so has the measurement
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ticks += sum(
                map(int, Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:13])
            )
    return 1000 * ticks / os.sysconf("SC_CLK_TCK")


def real(case: Case, plant: Plant, at: Broker, folder: Path, rounds: int) -> Cost:
    """A round of the real processes."""
    settings = {
        "--start": case.window,
        "--chunk": case.chunk,
        "--window": case.window,
        "--iterations": case.iterations,
        "--commit": case.commit,
        "--rounds": rounds,
        "--network": "dense",
        "--policy": "all",
    }
    if not case.kits:
        settings |= {"--federation": "steel"}
    parties = Processes(folder, plant, at.url, settings, kits=at.kits)
    processes = {"coordinator": parties.head()} | {
        name: parties.sensor(name) for name in case.names
    }
    seen: dict[int, float] = {}  # closed rounds -> what all had computed by then
    try:
        while processes["coordinator"].poll() is None:
            last = re.findall(rb'"round":(\d+)', parties.log("coordinator").read_bytes())
            if last and int(last[-1]) not in seen:
                put_first(case)
                seen[int(last[-1])] = cpu(each.pid for each in processes.values())
            time.sleep(0.02)
        for name, process in processes.items():
            assert process.wait(PATIENCE) == 0, f"{name}: {parties.log(name).read_text()[-2000:]}"
    finally:
        for process in processes.values():
            process.kill()
    seconds = [each.seconds for each in history(parties.state("coordinator"))]
    counted = {round_: took for round_, took in seen.items() if WARM * rounds <= round_ < rounds}
    first, last_ = min(counted), max(counted)
    assert first < last_, (
        "so few rounds take less than the second between two reports: pass more --rounds"
    )
    return Cost.per_round(seconds, (counted[last_] - counted[first]) / (last_ - first))


def compute(case: Case, plant: Plant, rounds: int) -> Cost:
    """A round's arithmetic, in one process, with as many cores as there are here.

    The longest way through it: embed at the slowest sensor, represent, learn at the slowest party.
    """
    simulation, cores = simulated(case.spec, plant), len(os.sched_getaffinity(0))
    totals, least = [], []
    for round_ in range(1, rounds + 1):
        sent, represented_, learnt = _step(simulation, case, round_)
        totals.append(sum(sent) + represented_ + sum(learnt))
        least.append(max(max(sent) + represented_ + max(learnt), totals[-1] / cores))
    return Cost.per_round(least, 1000 * statistics.fmean(totals[int(WARM * rounds) :]))


def _step(
    simulation: Simulation, case: Case, round_: int
) -> tuple[list[float], float, list[float]]:
    """What `Simulation.step` does, with a clock: each sensor's way up,
    the head's representation, all training.
    """
    rows = slice(*case.spec.window.span(round_))
    samples, labels = (
        [each[rows] for each in simulation.stream.samples],
        simulation.stream.labels[rows],
    )
    clock = _Clock()
    sent, up = [], []
    for sensor, part in zip(simulation.sensors, samples, strict=True):
        sent.append(release(case.spec, sensor, part, round_))
        up.append(clock.lap())
    phi = simulation.head.represent([each.received for each in sent])
    torch.nn.functional.cross_entropy(simulation.head.logits(phi.embeddings), labels).item()
    middle = clock.lap()
    learnt = []
    for sensor, part in zip(simulation.sensors, samples, strict=True):
        sensor.train(part, labels, phi, case.iterations, round_)
        learnt.append(clock.lap())
    simulation.head.train(phi, labels, case.iterations, round_)
    return up, middle, [*learnt, clock.lap()]


class _Clock:
    def __init__(self) -> None:
        self._at = time.process_time()

    def lap(self) -> float:
        """Seconds of computing since it was last asked."""
        before, self._at = self._at, time.process_time()
        return self._at - before


# The bare client


def sizes(case: Case, plant: Plant) -> tuple[int, int, int]:
    """Bytes that a round moves: the head's opening, its answer, a sensor's embeddings."""
    simulation, at = simulated(case.spec, plant), {"run": "0" * 16, "attempt": 1, "round": 99}
    rows = slice(*case.spec.window.span(1))
    sent = [
        release(case.spec, sensor, part[rows], 1).received
        for sensor, part in zip(simulation.sensors, simulation.stream.samples, strict=True)
    ]
    phi, ids = simulation.head.represent(sent), ["p12345"] * case.chunk
    frames = (
        opening_frames(0, case.window, case.window - case.chunk, ids, **at),
        representation_frames(
            phi, simulation.stream.labels[rows], [case.iterations] * case.sensors, **at
        ),
        embedding_frames(sent[0], None, (), session="0" * 16, **at),
    )
    first, answer, up = (sum(len(encode_frame(each)) for each in kind) for kind in frames)
    return first, answer, up


def client(port: int, kit: Kit | None) -> paho.Client:
    """Connected, with TLS if there is a kit; nothing is delayed by Nagle's algorithm."""
    found = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    if kit:
        found.tls_set_context(kit.tls_context())
    found.connect("127.0.0.1", port)
    found.socket().setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # type: ignore[union-attr]
    return found


def echo(port: int, kit: Kit | None, name: str, size: int, ready: Any) -> None:
    """A sensor's process: answers each opening with so many bytes,
    from within paho's own thread.
    """
    mine, payload = client(port, kit), bytes(size)

    def answer(_client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        if message.topic.endswith("opened"):
            mine.publish(f"edge-node/v1/steel/vfl/{name}/embeddings", payload)

    mine.on_message = answer
    mine.on_subscribe = lambda *_: ready.release()
    mine.subscribe(
        [("edge-node/v1/steel/vfl/opened", 0), ("edge-node/v1/steel/vfl/representation", 0)]
    )
    mine.loop_forever()


def bare(case: Case, at: Broker, moved: tuple[int, int, int], rounds: int) -> Cost:
    """Mean round of frames of these sizes: out to all sensors, and back from each."""
    first, answer, up = moved
    ready = _FORK.Semaphore(0)
    others = [
        _FORK.Process(
            target=echo, args=(at.port, at.members.get(name), name, up, ready), daemon=True
        )
        for name in case.names
    ]
    for each in others:
        each.start()
    head = client(at.port, at.members.get("coordinator"))
    back = threading.Semaphore(0)
    head.on_message = lambda *_: back.release()
    head.on_subscribe = lambda *_: ready.release()
    head.subscribe("edge-node/v1/steel/vfl/+/embeddings")
    head.loop_start()
    try:
        for _ in range(case.sensors + 1):
            assert ready.acquire(timeout=PATIENCE)
        pids = [os.getpid(), *(each.pid for each in others if each.pid)]
        put_first(case)
        ends, before = [time.perf_counter()], cpu(pids)
        for _ in range(rounds):
            head.publish("edge-node/v1/steel/vfl/representation", bytes(answer))
            head.publish("edge-node/v1/steel/vfl/opened", bytes(first))
            for _ in range(case.sensors):
                assert back.acquire(timeout=30)
            ends.append(time.perf_counter())
        return Cost.per_round(
            [after - begun for begun, after in pairwise(ends)], (cpu(pids) - before) / rounds
        )
    finally:
        for each in others:
            each.kill()
        head.loop_stop()
        head.disconnect()


# The comparison


def measure(case: Case, rounds: int, repetitions: int) -> dict[str, object]:
    """One case, as a row of the table."""
    runs, bares, computes = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folder.chmod(0o711)  # mosquitto's user must pass
        plant = Plant(folder / "plant", case.names)
        plant.feed(case.window + rounds * case.chunk)
        plant.close()
        moved = sizes(case, plant)
        with broker(case, folder) as at:
            for repetition in range(repetitions):
                bares.append(bare(case, at, moved, rounds))
                (work := folder / str(repetition)).mkdir()
                runs.append(real(case, plant, at, work, rounds))
                computes.append(compute(case, plant, rounds))
    run, plain, least = (
        Cost(*map(statistics.median, zip(*each, strict=True))) for each in (runs, bares, computes)
    )
    figures = {
        "rounds_per_second": 1000 / run.wall,
        "vfl_ms": run.wall,
        "bare_ms": plain.wall,
        "compute_ms": least.wall,
        "overhead_ms": run.wall - plain.wall - least.wall,
        "vfl_to_bare": run.wall / plain.wall,
        "vfl_cpu_ms": run.cpu,
        "bare_cpu_ms": plain.cpu,
        "simulated_cpu_ms": least.cpu,
        "overhead_cpu_ms": run.cpu - plain.cpu - least.cpu,
    }
    load = round(os.getloadavg()[0], 1)
    return {**case._asdict(), "bytes": moved, "load": load} | {
        name: round(each, 3) for name, each in figures.items()
    }


def main() -> None:
    """Measure all cases; a line of JSON for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sensors", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--window", type=int, nargs="+", default=[64, 1000], help="products of a round"
    )
    parser.add_argument("--iterations", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--commit", type=int, nargs="+", default=[20])
    parser.add_argument(
        "--kits", type=int, nargs="+", default=[0], help="0: in the clear, 1: TLS and signatures"
    )
    parser.add_argument(
        "--alone", action="store_true", help="before all other work of the machine (root only)"
    )
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for sensors, window, iterations, commit, kits in product(
        given.sensors, given.window, given.iterations, given.commit, given.kits
    ):
        case = Case(
            sensors, window, max(1, window // 20), iterations, commit, bool(kits), given.alone
        )
        print(json.dumps(measure(case, given.rounds, given.repetitions)), flush=True)


if __name__ == "__main__":
    main()
