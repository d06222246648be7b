"""Cost of taking in a federation's statistics:
processor seconds and peak memory over the number of nodes.

    python -m benchmarks.statistics_sums --nodes 10 50 200

The contributions, MobileNetV2's 1,280 features in full and projected, lie on disk, as when their
blobs have arrived; a few different files stand for all. Each is read, checked and added as a
coordinator does it. Each figure is of a process of its own, on one thread and without torch: memory
is its peak (VmHWM) over what it had before.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.node_scale import peak_memory
from broker_config.protocol.codec import encode_tensors
from trainer.federation.server.robust_rules import OnDisk
from trainer.federation.server.round_sums import StatisticsContributions
from trainer.federation.server.spec import Request, draft
from trainer.methods.statistics_head import statistics_head
from trainer.statistics import sums

# that stand for all nodes' contributions; of each node, CLASSES in all
FILES, CLASSES, IMAGES = 4, 6, 12
DIMENSIONS = (256, 1280)


def write(folder: Path, dimensions: int) -> None:
    """The statistics of some nodes, of random features."""
    for number in range(FILES):
        random = np.random.default_rng(number)
        features = random.normal(0, 1, (IMAGES, sums.VIEWS, dimensions))
        features /= np.linalg.norm(features, axis=2, keepdims=True)
        made = sums.collect(features, np.arange(IMAGES) % 3 + number % 4, CLASSES).arrays()
        (folder / f"{dimensions}-{number}").write_bytes(encode_tensors(made))


def measure(dimensions: int, nodes: int, folder: Path) -> tuple[float, float]:
    """Processor seconds, and bytes of memory, of taking in the statistics of so many nodes."""
    expected = sums.specs(CLASSES, dimensions)
    request = Request("fedavg", model="small", weights="none")
    spec, _ = draft(
        request,
        federation="statistics",
        classes=[f"class {each}" for each in range(CLASSES)],
        nodes=nodes,
    )
    spec = msgspec.structs.replace(spec, statistics=expected)
    contributions = StatisticsContributions(spec, statistics_head(), spec.rounds)
    before, started = peak_memory(Path("/proc/self")), time.process_time()
    for number in range(nodes):
        source = OnDisk(folder / f"{dimensions}-{number % FILES}", expected)
        contributions.validate(source)
        contributions.add(f"node-{number:03}", source, 1.0)
    assert contributions.aggregate({})["statistics.images"].sum() == nodes * IMAGES
    return time.process_time() - started, peak_memory(Path("/proc/self")) - before


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 50, 200])
    asked = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes that measure
    print("| features | bytes a node |" + "".join(f" {nodes} nodes |" for nodes in asked.nodes))
    print("| --- | --- |" + " --- |" * len(asked.nodes))
    with tempfile.TemporaryDirectory() as name:
        for dimensions in DIMENSIONS:
            write(Path(name), dimensions)
            size = (Path(name) / f"{dimensions}-0").stat().st_size
            cells = []
            for nodes in asked.nodes:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    seconds, memory = pool.submit(measure, dimensions, nodes, Path(name)).result()
                cells.append(f" {seconds:.1f} s, {memory / 1e6:.0f} MB |")
            print(f"| {dimensions:,} | {size / 1e6:.1f} MB |" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
