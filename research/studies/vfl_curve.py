"""The surrogate that agents learn from, fitted to the learning curves of real federations under
many decisions.

`python -m research.studies.vfl_curve --data cmapss=FOLDER --seeds 1`, after
`python -m research dao-vfl curve --preset cpu --data cmapss=FOLDER --seeds 1`; likewise
`cifar10=FILE`.
"""

import argparse
from pathlib import Path

import numpy as np

from research.dao_vfl import measures
from research.dao_vfl.cell import Finished
from research.dao_vfl.experiment import DAO_VFL, DAOVFLOrder
from research.dao_vfl.policies.learning_curve import Run, fit
from research.runner.experiment import Experiment
from trainer import progress


def main() -> None:
    """Fit, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="NAME=PATH")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--store", type=Path, default=Path("research/results/dao_vfl"))
    options = parser.parse_args()
    name, _, path = options.data.partition("=")
    order = DAOVFLOrder(
        name="curve",
        preset=options.preset,
        data={name: Path(path)},
        seeds=options.seeds,
        store=options.store,
    )
    experiment = Experiment(DAO_VFL, order, progress.ignore)
    finished = experiment.finished()
    runs = [run(finished[cell.key]) for cell in experiment.cells if cell.key in finished]
    curve, error = fit(runs)
    print(f"{curve}, root mean squared error {error:.4f} over {len(runs)} federations")


def run(finished: Finished) -> Run:
    """A federation whose decisions stayed the same, and what it reached after each round."""
    reached = measures.reached(finished)
    return Run(
        np.tile(finished.cell.iterations, (len(reached), 1)), np.array(list(reached.values()))
    )


if __name__ == "__main__":
    main()
