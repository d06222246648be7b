"""Cost of closing a round, by aggregation rule:
processor seconds and peak memory over the number of nodes.

    python -m benchmarks.robust --nodes 10 50 200

The contributions, MobileNetV2's 9 MB each, lie on disk, as when a coordinator closes a round; a few
different files stand for all. Each figure is of a process of its own: memory is its peak (VmHWM)
over what it had before. The mean is shown for comparison: its sums are made as contributions
arrive, so it adds nothing to a round's end.
"""

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.node_scale import peak_memory
from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.messages import Aggregation, TensorSpec
from trainer.federation.server.aggregation import (
    FixedPointSum,
    Influence,
    clipped_mean,
    measure_updates,
    scale_for,
)
from trainer.federation.server.robust_rules import OnDisk, aggregate
from trainer.methods.base import MAX_IMAGES_WEIGHT
from trainer.models.initial_weights import initial_encoder

FILES = 8  # that stand for all nodes' contributions
RULES: tuple[str, ...] = get_args(Aggregation.__annotations__["rule"])


def write(folder: Path) -> None:
    """Some contributions, which differ from it as after a round's training."""
    broadcast = initial_encoder("mobilenet_v2", "surface", 0)
    for number in range(FILES):
        random = np.random.default_rng(number)
        tensors = {
            name: np.abs(array + random.normal(0, 1e-3, array.shape).astype(np.float32))
            for name, array in broadcast.items()
        }
        (folder / str(number)).write_bytes(encode_tensors(tensors))


def measure(rule: str, nodes: int, folder: Path) -> tuple[float, float]:
    """Processor seconds, and bytes of memory, of aggregating a round of so many nodes."""
    broadcast = initial_encoder("mobilenet_v2", "surface", 0)
    expected = {
        name: TensorSpec(array.shape, scale_for(array, nodes)) for name, array in broadcast.items()
    }
    sources = {
        f"node-{number:03}": OnDisk(folder / str(number % FILES), expected)
        for number in range(nodes)
    }
    before, started = peak_memory(Path("/proc/self")), time.process_time()
    sums = FixedPointSum(expected, nodes, MAX_IMAGES_WEIGHT)
    if rule == "clipped_mean":
        influences = {
            node: Influence(10.0, measure_updates(source.tensors(), broadcast))
            for node, source in sources.items()
        }
        clipped_mean(sums, sources, influences, broadcast)
    elif rule == "mean":
        for source in sources.values():
            sums.add(source.tensors(), 10.0)
        sums.mean()
    else:
        liars = nodes // 5
        aggregate(Aggregation(rule, liars), sources, broadcast)  # type: ignore[arg-type]
    return time.process_time() - started, peak_memory(Path("/proc/self")) - before


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 50, 200])
    asked = parser.parse_args()
    print("| rule |" + "".join(f" {nodes} nodes |" for nodes in asked.nodes))
    print("| --- |" + " --- |" * len(asked.nodes))
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        for rule in RULES:
            cells = []
            for nodes in asked.nodes:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    seconds, memory = pool.submit(measure, rule, nodes, Path(name)).result()
                cells.append(f" {seconds:.1f} s, {memory / 1e6:.0f} MB |")
            print(f"| {rule} |" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
