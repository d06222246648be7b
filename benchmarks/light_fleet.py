"""A fleet of nodes that share connections against one coordinator: seconds a round,
memory and processor time.

    python -m benchmarks.light_fleet --nodes 100 300 1000 --rounds 3

A real `edge-node coordinate`, a mosquitto, and nodes that train nothing
(`benchmarks/light_nodes.py`) and all contribute at once. Every mean is compared with one computed
here by the protocol's formula. Memory is the process's peak (VmHWM). All share the machine's
processors, so a round takes what all of them need together.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from benchmarks.light_nodes import share
from benchmarks.node_scale import run_coordinator, wrong_values
from broker_config.broker.embedded import start_broker
from broker_config.protocol.messages import Spec
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix

_MEGA = 1e6
_A_PROCESS = 100  # nodes


class Figures(msgspec.Struct):
    """What one fleet took. Bytes in MB; seconds are a round's, the median."""

    nodes: int
    rounds: int
    blob: float  # of a node
    seconds: float  # from one round's opening to the next
    coordinator_peak: float
    coordinator_cpu: float  # seconds a round
    wrong: int  # values of all means that differ from the formula's


def measure(nodes: int, rounds: int, model: str, folder: Path) -> Figures:
    """Run one federation to its end; everything lies in `folder`."""
    weights = folder / "weights.safetensors"
    save_file(strip_prefix("encoder", initial_encoder(model, "none", 0)), weights)
    with start_broker(folder / "broker", kind="mosquitto") as broker:
        spec, _, watch = run_coordinator(
            broker.url,
            nodes,
            rounds,
            ("--model", model, "--weights", str(weights)),
            folder,
            lambda spec: _take_part(broker.url, spec, nodes, folder),
        )
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    closed = [event for event in events if event["event"] == "RoundClosed"]
    largest = 4 * sum(int(np.prod(each.shape)) for each in spec.tensors.values())
    return Figures(
        nodes=nodes,
        rounds=rounds,
        blob=largest / _MEGA,
        seconds=statistics.median(event["seconds"] for event in closed[1:] or closed),
        coordinator_peak=watch.peak / _MEGA,
        coordinator_cpu=watch.cpu / rounds,
        wrong=wrong_values(spec, nodes, rounds, folder),
    )


def _take_part(url: str, spec: Spec, nodes: int, folder: Path) -> None:
    """Let all nodes take part to the end, up to a hundred of them in a process."""
    processes = -(-nodes // _A_PROCESS)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = [
            pool.submit(share, url, spec, range(nodes)[k::processes], folder)
            for k in range(processes)
        ]
        for each in running:
            each.result()


def main() -> None:
    """Print a line for each fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model",
        default="maps_small",
        help="whose encoder all send, with a classifier of two classes",
    )
    parser.add_argument("--scratch", type=Path, help="folder for everything; needs 4 blobs a node")
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for nodes in asked.nodes:
        with tempfile.TemporaryDirectory(dir=asked.scratch) as name:
            figures = measure(nodes, asked.rounds, asked.model, Path(name))
            print(msgspec.json.encode(figures).decode(), flush=True)


if __name__ == "__main__":
    main()
