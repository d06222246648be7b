"""Ablation of FedTFI's exchange: the content of others' patches against any disturbance of the
maps.

    python -m research.studies.exchange_parts --kth KTH --weights VGG.safetensors --seeds 5

runs `table4`'s FedTFI with both skews on KTH's fabrics, at one class a node, where the bank has
been spoilt for its readers: `any label` hands out its patches in another order, so that a patch of
a label holds what any other may have; `drawn` has Gaussian numbers in their place, with the mean
and deviation of each channel. Beside them stand the patches as they are and the same network
without an exchange, from the experiment's store. Results are kept in exchange_parts.jsonl there;
what is in it is not run again.
"""

import argparse
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge_node.extensions.textures import patch_bank
from research.fedtfi.cell import Cell, Finished
from research.fedtfi.data import Inputs
from research.fedtfi.experiment import FEDTFI, FedTFIOrder
from research.fedtfi.grids import SCENARIOS
from research.fedtfi.presets import BOTH_1, SMALL
from research.fedtfi.run import run_cell
from research.runner.experiment import Experiment
from research.runner.processes import over_processes
from research.runner.statistics import paired_difference, spread
from research.runner.store import Records
from trainer import progress
from trainer.models.named_tensors import Arrays


class Reached(msgspec.Struct, frozen=True):
    """Accuracy of the last shared model."""

    key: str  # of the cell as it would be without a spoilt bank
    spoilt: str
    seed: int
    accuracy: float


class Job(NamedTuple):
    """A federation, and how its bank is spoilt."""

    cell: Cell
    spoilt: str


def any_label(patches: np.ndarray, filled: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The patches [capacity, C, m, m], those in `filled` places in another order."""
    found = patches.copy()
    found[filled] = patches[random.permutation(filled)]
    return found


def drawn(patches: np.ndarray, filled: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Gaussian numbers with the mean and deviation of each channel in `filled` places."""
    found, there = patches.copy(), patches[filled]
    mean, deviation = (moment(there, axis=(0, 2, 3))[:, None, None] for moment in (np.mean, np.std))
    found[filled] = mean + deviation * random.standard_normal(there.shape)
    return found


SPOILT: dict[str, Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]] = {
    "any label": any_label,
    "drawn": drawn,
}


def spoil(name: str, received: Arrays) -> Arrays:
    """A broadcast whose bank is spoilt; the same one is so for all who read it."""
    patches, filled = received["bank.patches"], np.flatnonzero(received["bank.owners"] >= 0)
    if not len(filled):
        return received
    seed = int.from_bytes(hashlib.blake2b(patches.tobytes(), digest_size=8).digest(), "big")
    return {**received, "bank.patches": SPOILT[name](patches, filled, np.random.default_rng(seed))}


def run(job: Job, inputs: Inputs) -> Reached:
    """One federation, in a process whose methods have no other bank meanwhile."""
    honest = patch_bank.remove_own_patches
    patch_bank.remove_own_patches = lambda broadcast, node: honest(
        spoil(job.spoilt, broadcast), node
    )
    try:
        finished = run_cell(job.cell, inputs)
    finally:
        patch_bank.remove_own_patches = honest
    return Reached(job.cell.key, job.spoilt, job.cell.seed, finished.accuracy)


def rows(
    finished: Mapping[str, Finished], cells: Sequence[Cell], reached: Sequence[Reached]
) -> Iterator[tuple[str, dict[int, float]]]:
    """Names, and percent by seed."""
    for name, method in (("as they are", "fedtfi"), ("no exchange", "fedavg")):
        there = [
            finished[cell.key] for cell in cells if cell.method == method and cell.key in finished
        ]
        yield name, {each.cell.seed: 100 * each.accuracy for each in there}
    for name in SPOILT:
        yield name, {each.seed: 100 * each.accuracy for each in reached if each.spoilt == name}


def main() -> None:
    """Run what is missing and print a line for each kind of bank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kth", type=Path, required=True, help="folder with sample_a to sample_d")
    parser.add_argument("--weights", required=True, help="VGG19's first layers")
    parser.add_argument(
        "--store", type=Path, default=Path("research/results/fedtfi"), help="of the experiments"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    order = FedTFIOrder(
        name="table4",
        preset="quick",
        data={"kth": asked.kth},
        weights=[asked.weights],
        seeds=asked.seeds,
        store=asked.store,
        workers=asked.workers,
    )
    experiment = Experiment(
        FEDTFI, order, lambda event: print(progress.format_event(event), flush=True)
    )
    records = Records(asked.store / "exchange_parts.jsonl", Reached)
    whole = (SMALL.whole, SCENARIOS[BOTH_1].partition)
    cells = [cell for cell in experiment.cells if (cell.model, cell.setting.partition) == whole]
    exchanging = [cell for cell in cells if cell.method == "fedtfi"]
    known = {(each.key, each.spoilt) for each in records}
    jobs = [
        Job(cell, name) for cell in exchanging for name in SPOILT if (cell.key, name) not in known
    ]
    if jobs:
        for each in over_processes(asked.workers, run, jobs, experiment.inputs(exchanging)):
            records.add(each)
            print(f"{each.spoilt}, seed {each.seed}: {100 * each.accuracy:.1f} %", flush=True)
    keys = {cell.key for cell in exchanging}
    found = dict(rows(experiment.finished(), cells, [each for each in records if each.key in keys]))
    for name, values in found.items():
        over = paired_difference(values, found["no exchange"])
        more = (
            f"; over no exchange {over.mean:+.1f} ± {over.half:.1f}"
            if over and name != "no exchange"
            else ""
        )
        print(
            f"{name}: {spread(values.values()).mean:.1f} ± "
            f"{spread(values.values()).deviation:.1f} %{more}"
        )


if __name__ == "__main__":
    main()
