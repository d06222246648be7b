"""Learning curves of real federations under many decisions, and the surrogate fitted to them.

`python -m research.studies.vfl_curve --cmapss FOLDER [--batches 32]`: FD002, two sensors with
alternate columns, validation engines (a fifth of the training file's), never the test file.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from broker_config.protocol.vfl_messages import Recipe, VflSpec, Window
from research.dao_vfl.policies.learners import Played
from research.dao_vfl.policies.learning_curve import Run, fit
from trainer.data import cmapss
from trainer.training.seeding import generator
from trainer.vfl.simulation import Simulation, Stream

_COLUMNS = cmapss.COLUMNS[3:]  # the sensors: 21, in turn to one side and the other
_DECISIONS = ((1, 1), (2, 2), (3, 3), (5, 5), (10, 10), (5, 1), (1, 5), (10, 1), (1, 10), (3, 7), (6, 2))


def main() -> None:
    """Play, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cmapss", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batches", type=int, default=32, help="parts of a set, a step each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in range(options.seeds):
        training, validation = streams(options.cmapss, seed)
        for decision in _DECISIONS:
            run = play(training, validation, decision, options.rounds, options.batches, seed)
            runs.append(run)
            print(f"seed {seed}, E = {decision}: accuracy {run.accuracy[0]:.3f} .. {run.accuracy[-1]:.3f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([[run.iterations.tolist(), run.accuracy.tolist()] for run in runs]))
    curve, error = fit(runs)
    print(f"{curve}, root mean squared error {error:.4f}")


def play(training: Stream, validation: Stream, decision: tuple[int, int], rounds: int, batches: int, seed: int) -> Run:
    """One run with a fixed decision: accuracy on the validation engines after each round."""
    decisions = np.tile(decision, (rounds, 1))
    played = Played(line_of(training, batches, seed), *validation)
    return Run(decisions, np.array([played(each) for each in decisions]))


def line_of(stream: Stream, batches: int, seed: int) -> Simulation:
    """A federation that has learnt nothing yet."""
    spec = VflSpec(
        federation="curve", run="curve", software="benchmark", sensors=("a", "b"), network="conv",
        cycles=cmapss.CYCLES, classes=cmapss.CLASSES, reading="expectation", window=Window(size=2000),
        recipe=Recipe(batches=batches), seed=seed,
    )  # fmt: skip
    return Simulation(spec, stream)


def streams(folder: Path, seed: int) -> tuple[Stream, Stream]:
    """Training and validation products; columns standardised within each operating condition."""
    engines = cmapss.load_engines(folder / "train_FD002.txt.gz")
    engines = engines._replace(values=_standardised(engines.values))
    random, rows = generator(seed, "curve"), engines.labelled()
    names = np.unique(engines.engine)
    held_out = np.isin(engines.engine[rows], random.permutation(names)[: len(names) // 5])
    parts = []
    for chosen, most in ((rows[~held_out], 50_000), (rows[held_out], 2_000)):
        order = chosen[random.permutation(len(chosen))[:most]]
        samples = tuple(torch.from_numpy(engines.samples(order, _COLUMNS[k::2])) for k in range(2))
        parts.append(Stream(samples, torch.from_numpy(engines.life[order])))
    return parts[0], parts[1]


def _standardised(values: NDArray[np.float32]) -> NDArray[np.float32]:
    conditions = np.unique(values[:, :3].round(), axis=0, return_inverse=True)[1].ravel()
    columns = values.copy()
    for condition in np.unique(conditions):
        inside = conditions == condition
        columns[inside] = (columns[inside] - columns[inside].mean(0)) / (columns[inside].std(0) + 1e-6)
    return columns


if __name__ == "__main__":
    main()
