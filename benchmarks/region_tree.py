"""A fleet in regions against the same fleet at one coordinator: seconds a round, memory, and a model of what it costs.

    python -m benchmarks.region_tree --nodes 1000 --regions 0 10 --rounds 3
    python -m benchmarks.region_tree --fit figures.jsonl --plants 10000 --megabytes 9.07 --regions 100

A real `edge-node coordinate`, an `edge-node relay` for each region, a mosquitto for each of them, and nodes that train
nothing (`benchmarks/light_nodes.py`) and all contribute at once. Every mean is compared with one computed here by
the protocol's formula for all nodes, which knows of no regions. Memory is a process's peak (VmHWM). All share the
machine's processors, so a round takes what all of them need together.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from safetensors.numpy import save_file

from benchmarks.light_nodes import share
from benchmarks.node_scale import Watch, find_spec, wrong_values
from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix

_MEGA = 1e6
_A_PROCESS = 100  # nodes


class Figures(msgspec.Struct):
    """What one fleet took. Bytes in MB; seconds are a round's, the median."""

    nodes: int
    regions: int  # 0: there is one coordinator
    rounds: int
    blob: float  # of a node
    seconds: float  # from one round's opening to the next
    coordinator_peak: float
    coordinator_cpu: float  # seconds a round
    relay_peak: float  # the highest
    relay_cpu: float  # seconds a round, of the busiest
    wrong: int  # values of all means that differ from the formula's


def measure(nodes: int, regions: int, rounds: int, model: str, folder: Path) -> Figures:
    """Run one federation to its end; everything lies in `folder`."""
    with ExitStack() as stack:
        above = stack.enter_context(start_broker(folder / "broker", kind="mosquitto"))
        sizes = [len(range(number, nodes, regions)) for number in range(regions)]
        granted = [f"--region=region-{number}={size}" for number, size in enumerate(sizes)]
        save_file(strip_prefix("encoder", initial_encoder(model, "none", 0)), weights := folder / "weights.safetensors")
        coordinator = _start(
            folder / "coordinator", "coordinate", above.url, "--classes", "a,b", "--nodes", regions or nodes,
            "--rounds", rounds, "--method", "fedavg", "--aggregate", "mean", "--model", model, "--weights", weights,
            "--codec", "none", *granted,
        )  # fmt: skip
        stack.callback(coordinator.kill)
        watches = [Watch(coordinator.pid, folder / "coordinator")]
        spec = find_spec(Endpoint.parse(above.url), coordinator)
        fleets = [(above.url, "default", range(nodes))] if not regions else []
        relays = []
        for number, size in enumerate(sizes):
            below = stack.enter_context(start_broker(folder / f"broker-{number}", kind="mosquitto"))
            relay = _start(
                folder / f"relay-{number}", "relay", above.url, "--name", f"region-{number}", "--region",
                f"plants-{number}", "--nodes", size, "--region-broker", below.url,
            )  # fmt: skip
            stack.callback(relay.kill)
            relays.append(relay)
            watches.append(Watch(relay.pid, folder / f"relay-{number}"))
            fleets.append((below.url, f"plants-{number}", range(number, nodes, regions)))
        _take_part(fleets, [coordinator, *relays], folder)
        assert [process.wait(120) for process in (*relays, coordinator)] == [0] * (regions + 1)
        for watch in watches:
            watch.join()
    events = [json.loads(line) for line in (folder / "coordinator.events").read_text().splitlines()]
    closed = [event for event in events if event["event"] == "RoundClosed"]
    largest = 4 * sum(int(np.prod(each.shape)) for each in spec.tensors.values())
    return Figures(
        nodes=nodes,
        regions=regions,
        rounds=rounds,
        blob=largest / _MEGA,
        seconds=statistics.median(event["seconds"] for event in closed[1:] or closed),
        coordinator_peak=watches[0].peak / _MEGA,
        coordinator_cpu=watches[0].cpu / rounds,
        relay_peak=max((watch.peak for watch in watches[1:]), default=0.0) / _MEGA,
        relay_cpu=max((watch.cpu for watch in watches[1:]), default=0.0) / rounds,
        wrong=wrong_values(spec, nodes, rounds, folder),
    )


def _start(state: Path, *words: object) -> subprocess.Popen[bytes]:
    with state.with_suffix(".events").open("wb") as output:
        command = [sys.executable, "-m", "edge.cli.main", *map(str, words), "--json", "--state", str(state)]
        return subprocess.Popen(command, stdout=output)


def _take_part(
    fleets: Sequence[tuple[str, str, range]], servers: Sequence[subprocess.Popen[bytes]], folder: Path
) -> None:
    """Let each fleet (broker, federation, numbers of its nodes) take part to the end."""
    specs = [
        find_spec(Endpoint.parse(url), server, name)
        for (url, name, _), server in zip(fleets, servers[-len(fleets) :], strict=True)
    ]
    parts = [
        (url, spec, numbers[k :: -(-len(numbers) // _A_PROCESS)])
        for (url, _, numbers), spec in zip(fleets, specs, strict=True)
        for k in range(-(-len(numbers) // _A_PROCESS))
    ]
    with ProcessPoolExecutor(len(parts), multiprocessing.get_context("spawn")) as pool:
        for running in [pool.submit(share, url, spec, numbers, folder) for url, spec, numbers in parts]:
            running.result()


# The model: a round takes an aggregator's processor its children times (a + b MB of a child's blob). Seconds that pass
# depend on what else the machine does; a processor's do so hardly.


class Cost(NamedTuple):
    """Processor seconds of an aggregator."""

    start: float  # of its process, for each round that was measured
    child: float
    megabyte: float


class Sample(NamedTuple):
    """What one aggregator has used in a round."""

    children: int
    megabytes: float  # of each child's blob: a relay's sums are 64-bit, twice a node's
    seconds: float


def samples(figures: Sequence[Figures]) -> list[Sample]:
    """All aggregators that were measured."""
    above = [
        Sample(each.regions or each.nodes, each.blob * (2 if each.regions else 1), each.coordinator_cpu)
        for each in figures
    ]
    relays = [each for each in figures if each.regions]
    return above + [Sample(-(-each.nodes // each.regions), each.blob, each.relay_cpu) for each in relays]


def fit(measured: Sequence[Sample]) -> Cost:
    """By least squares; residuals are relative to what was measured."""
    rows = np.array([[1, each.children, each.children * each.megabytes] for each in measured])
    seconds = np.array([each.seconds for each in measured])
    return Cost(*np.linalg.lstsq(rows / seconds[:, None], np.ones(len(measured)), rcond=None)[0].tolist())


def extrapolate(cost: Cost, plants: int, megabytes: float, regions: int) -> float:
    """Seconds of a round where each aggregator has a processor and regions work at once; without nodes and network."""
    if not regions:
        return plants * (cost.child + cost.megabyte * megabytes)
    below, above = plants / regions, cost.child + 2 * cost.megabyte * megabytes
    return below * (cost.child + cost.megabyte * megabytes) + regions * above


def main() -> None:
    """Print a line for each fleet, or the model fitted to such lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--regions", type=int, nargs="+", default=[0, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", default="maps_small", help="whose encoder all send, with a classifier of two classes"
    )
    parser.add_argument("--scratch", type=Path, help="folder for everything; needs 4 blobs a node")
    parser.add_argument("--fit", type=Path, help="measure nothing: fit the model to these lines")
    parser.add_argument("--plants", type=int, default=10_000, help="to extrapolate to")
    parser.add_argument("--megabytes", type=float, default=9.07, help="of their blobs")
    asked = parser.parse_args()
    if asked.fit:
        figures = [msgspec.json.decode(line, type=Figures) for line in asked.fit.read_text().splitlines()]
        measured = samples(figures)
        cost = fit(measured)
        print(f"{1000 * cost.child:.1f} ms a child, {1000 * cost.megabyte:.1f} ms a MB, {cost.start:.2f} s the process")
        for each in measured:
            modelled = cost.start + each.children * (cost.child + cost.megabyte * each.megabytes)
            print(f"{each.children} children of {each.megabytes:.2f} MB: {each.seconds:.2f} s, by it {modelled:.2f}")
        for regions in asked.regions:
            seconds = extrapolate(cost, asked.plants, asked.megabytes, regions)
            print(f"{asked.plants} plants, {regions} regions, {asked.megabytes} MB: {seconds:.1f} s, extrapolated")
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for regions in asked.regions:
        with tempfile.TemporaryDirectory(dir=asked.scratch) as name:
            print(
                msgspec.json.encode(measure(asked.nodes, regions, asked.rounds, asked.model, Path(name))).decode(),
                flush=True,
            )


if __name__ == "__main__":
    main()
