"""A fleet against one coordinator: memory, time, disk and bytes over the number of nodes.

    python -m benchmarks.node_scale --nodes 10 200 --rounds 3

A real `edge-node coordinate`, a mosquitto of its own for each fleet, MobileNetV2's tensors, nodes
that train nothing (`benchmarks/synthetic_nodes.py`) and all contribute at once. Every mean is
compared with one computed here by the protocol's formula. Memory is the process's peak (VmHWM).
Nodes, coordinator and broker share the machine's processors.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from safetensors.numpy import load_file

from benchmarks.synthetic_nodes import (
    BLOBS,
    Facts,
    draw,
    last_tensor,
    own_number,
    own_weight,
    take_part,
)
from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode, encode_tensors
from broker_config.protocol.messages import Spec
from trainer.methods.base import MAX_IMAGES_WEIGHT
from trainer.models.named_tensors import Arrays

_MEGA = 1e6
T = TypeVar("T")


class Figures(msgspec.Struct):
    """What one fleet took.

    Bytes in MB, the sum or the highest over all rounds; seconds are a round's, the median.
    """

    nodes: int
    rounds: int
    blob: float
    seconds: float  # from one round's opening to the next
    seconds_per_node: float
    seconds_down: float  # until the last node has the broadcast
    coordinator_peak: float
    coordinator_cpu: float  # seconds for each contribution
    broker_peak: float
    broker_in: float
    broker_out: float
    broadcasts_sent: float  # how many times the coordinator sent each broadcast
    contributions_sent: float  # how many times the nodes sent each contribution
    state_peak: float  # of the coordinator's folder
    wrong: int  # values of all means that differ from the formula's


class Watch(threading.Thread):
    """Reads what a process has used so far, and its folder, until the process ends."""

    def __init__(self, process: int, folder: Path):
        super().__init__(daemon=True)
        self.peak = self.cpu = self.disk = 0.0  # bytes, seconds, bytes
        self._proc, self._folder = Path(f"/proc/{process}"), folder
        self.start()

    def run(self) -> None:
        """Read four times a second."""
        try:
            while peak := peak_memory(self._proc):
                self.peak, self.cpu = peak, cpu_seconds(self._proc)
                self.disk = max(self.disk, size_on_disk(self._folder))
                time.sleep(0.25)
        except OSError:
            pass  # it has ended


def peak_memory(proc: Path) -> float:
    """The most memory that a process has had, bytes; 0 once it has ended."""
    lines = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return 1024 * float(lines.get("VmHWM", "0 kB").split()[0])


def cpu_seconds(proc: Path) -> float:
    """The processor time of a process."""
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # clock ticks are 100 a second on Linux


def size_on_disk(folder: Path) -> int:
    """Bytes that a folder takes."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 512 * path.stat().st_blocks
        except FileNotFoundError:
            continue
    return total


def mosquitto_of(broker: EmbeddedBroker) -> int:
    """The process of a mosquitto, which is the child of the one that supervises it."""
    supervisor = broker.process.pid
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(child)


class Broker(NamedTuple):
    """What mosquitto has done so far: bytes."""

    peak: float
    read: int
    written: int

    @classmethod
    def look(cls, broker: EmbeddedBroker) -> "Broker":
        """What it has done so far."""
        proc = Path(f"/proc/{mosquitto_of(broker)}")
        counts = dict(line.split(": ") for line in (proc / "io").read_text().splitlines())
        return cls(peak_memory(proc), int(counts["rchar"]), int(counts["wchar"]))


def exact_mean(spec: Spec, nodes: int, round_: int) -> Arrays:
    """The mean of a round's contributions, by the formula of docs/protocol.md."""
    share = [round(own_weight(node) / MAX_IMAGES_WEIGHT * 2**24) for node in range(nodes)]
    sums = {name: np.zeros(spec.tensors[name].shape, np.int64) for name in draw(spec, 0)}
    last = last_tensor(
        encode_tensors({name: values.astype(np.float32) for name, values in sums.items()})
    )
    for master in range(BLOBS):
        tensors = draw(spec, master)
        for weight, count in Counter(share[master:nodes:BLOBS]).items():
            for name, values in tensors.items():
                sums[name] += count * _summand(values, weight, spec.tensors[name].scale)
    sums[last].flat[-1] = sum(
        int(_summand(own_number(node, round_), share[node], spec.tensors[last].scale))
        for node in range(nodes)
    )
    return {
        name: (
            total.astype(np.float64) / float(sum(share)) * 2.0 ** (24 - spec.tensors[name].scale)
        ).astype(np.float32)
        for name, total in sums.items()
    }


def _summand(values: np.ndarray, weight: int, scale: int) -> np.ndarray:
    return np.rint(values.astype(np.float64) * weight * 2.0 ** (scale - 24)).astype(np.int64)


def wrong_values(spec: Spec, nodes: int, rounds: int, folder: Path) -> int:
    """How many values of the broadcasts in `folder` differ from the exact mean of the round
    before.
    """
    wrong = 0
    for round_ in range(1, rounds + 1):
        received = load_file(folder / f"broadcast-{round_ + 1}")
        wrong += sum(
            int((received[name] != mean).sum())
            for name, mean in exact_mean(spec, nodes, round_).items()
        )
    return wrong


def run_coordinator(
    url: str,
    nodes: int,
    rounds: int,
    model: Sequence[str],
    folder: Path,
    take_part: Callable[[Spec], T],
) -> tuple[Spec, T, Watch]:
    """Run a coordinator to its end while all nodes take part.

    `folder` then holds its events and its state. Return its spec, what the nodes have returned,
    and what the process has used.
    """
    with (folder / "events").open("wb") as output:
        coordinator = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "edge_node",
                "coordinate",
                url,
                "--json",
                "--classes",
                "a,b",
                "--nodes",
                str(nodes),
                "--rounds",
                str(rounds),
                "--method",
                "fedavg",
                "--aggregate",
                "mean",
                *model,
                "--codec",
                "none",
                "--state",
                str(folder / "state"),
            ],
            stdout=output,
        )
        watch = Watch(coordinator.pid, folder / "state")
        try:
            spec = find_spec(Endpoint.parse(url), coordinator)
            facts = take_part(spec)
            assert coordinator.wait(120) == 0
        finally:
            coordinator.kill()
        watch.join()
    return spec, facts, watch


def measure(nodes: int, rounds: int, folder: Path) -> Figures:
    """Run one federation to its end; everything lies in `folder`."""
    with start_broker(folder / "broker", kind="mosquitto") as broker:
        spec, facts, watch = run_coordinator(
            broker.url,
            nodes,
            rounds,
            ("--model", "mobilenet_v2", "--weights", "surface"),
            folder,
            lambda spec: take_part(broker.url, spec, nodes, folder),
        )
        used = Broker.look(broker)
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    return summarise(spec, nodes, rounds, folder, events, facts, watch, used)


def find_spec(
    endpoint: Endpoint, coordinator: subprocess.Popen[bytes], federation: str = "default"
) -> Spec:
    """The spec that the coordinator has published."""
    topic = topics.spec(federation)
    while topic not in (found := read_retained(endpoint, [topic], wait=1.0)):
        assert coordinator.poll() is None, "the coordinator has ended"
    return decode(found[topic], Spec)


def summarise(
    spec: Spec,
    nodes: int,
    rounds: int,
    folder: Path,
    events: list[dict[str, Any]],
    facts: Facts,
    watch: Watch,
    used: Broker,
) -> Figures:
    """From what was seen to figures."""
    closed = [event for event in events if event["event"] == "RoundClosed"]
    end = next(event for event in events if event["event"] == "FederationFinished")
    size = next(event["bytes"] for event in events if event["event"] == "Contribution")
    first = {round_: min(t for r, t in facts.fetched if r == round_) for round_, _ in facts.fetched}
    last = {round_: max(t for r, t in facts.fetched if r == round_) for round_, _ in facts.fetched}
    down = [
        last[round_] - max([t for r, t in facts.accepted if r == round_ - 1], default=first[round_])
        for round_ in range(2, rounds + 2)
    ]
    seconds = statistics.median(event["seconds"] for event in closed)
    return Figures(
        nodes=nodes,
        rounds=rounds,
        blob=size / _MEGA,
        seconds=seconds,
        seconds_per_node=seconds / nodes,
        seconds_down=statistics.median(down),
        coordinator_peak=watch.peak / _MEGA,
        coordinator_cpu=watch.cpu / nodes / rounds,
        broker_peak=used.peak / _MEGA,
        broker_in=used.read / _MEGA,
        broker_out=used.written / _MEGA,
        broadcasts_sent=end["bytes_down"] / size / (rounds + 1),
        contributions_sent=facts.sent / size / nodes / rounds,
        state_peak=watch.disk / _MEGA,
        wrong=wrong_values(spec, nodes, rounds, folder),
    )


def main() -> None:
    """Print a line for each fleet, and how memory grows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 200])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="JSON lines")
    parser.add_argument("--scratch", type=Path, help="folder for everything; needs 30 MB a node")
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fleets = []
    for nodes in asked.nodes:
        with tempfile.TemporaryDirectory(dir=asked.scratch) as name:
            fleets.append(measure(nodes, asked.rounds, Path(name)))
        if asked.json:
            print(msgspec.json.encode(fleets[-1]).decode(), flush=True)
    if not asked.json:
        for field in Figures.__struct_fields__:
            print(
                f"{field:20}" + "".join(f"{_short(getattr(fleet, field)):>12}" for fleet in fleets)
            )
        ratio = fleets[-1].coordinator_peak / fleets[0].coordinator_peak
        print(
            f"memory of the coordinator, {fleets[-1].nodes} nodes to {fleets[0].nodes}: {ratio:.2f}"
        )


def _short(value: float) -> str:
    return (
        f"{value:.{max(0, 2 - int(math.log10(value)))}f}"
        if value >= 1 and isinstance(value, float)
        else f"{value:.3g}"
    )


if __name__ == "__main__":
    main()
