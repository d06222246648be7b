"""The consensus head's relatives that train,
beside the methods of the `scarce` grid in one of its settings.

    python -m research.studies.training_relatives neu=NEU xsdd=XSDD --weights
    mobilenet_v2.safetensors

runs what is missing of federations of five plants with five images of three classes each, 30 rounds
of six epochs at 64 px, and prints a table: mean and standard deviation over seeds of the mean over
plants, in %. Each relative has the six trials of ten rounds on the tuning pool that the other
methods had; the best one is run. The others' results are those of `python -m research afedcl
scarce`.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from research.afedcl import tuning
from research.afedcl.cell import Cell, Finished, Metric
from research.afedcl.experiment import AFedCLOrder, plan
from research.afedcl.labels import METHODS, rank
from research.afedcl.run import run_cell
from research.runner.paper import Grid
from research.runner.store import Records
from research.runner.tables import Table, format_spread
from trainer import progress
from trainer.federation.server.spec import suited_training

RELATIVES = ("pfedfda",)
SEEDS, SAMPLES, CLASSES = 3, 5, 3
TUNING_ROUNDS = 10
VIEWS: Mapping[str, Metric] = {"own": "own", "all": "everyone"}
AFEDCL = Path("research/results/afedcl/cells.jsonl")
OUT = Path("research/results/studies/training_relatives.jsonl")


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    data = {name: Path(folder) for name, _, folder in (each.partition("=") for each in asked.data)}
    store, others = Records(asked.out, Finished), list(Records(AFEDCL, Finished))

    def lay_out(name: str, seeds: int, rounds: int) -> Grid[Cell, Finished]:
        order = AFedCLOrder(
            name=name,
            preset="cpu",
            data=data,
            store=AFEDCL.parent,
            weights=[asked.weights],
            seeds=seeds,
            rounds=rounds,
        )
        return plan(order, others, progress.ignore)

    tune, scarce = lay_out("tune", 1, TUNING_ROUNDS), lay_out("scarce", SEEDS, 0)
    training = suited_training(asked.weights)
    _run(list_trials(tune.cells), tune, store)
    chosen = tuning.choose(RELATIVES, training, store, lambda _: True)
    compared = [cell for cell in scarce.cells if is_compared(cell)]
    own = [
        msgspec.structs.replace(cell, method=method, options=trial.options, training=trial.training)
        for cell in compared
        if cell.method == "fedavg"
        for method, trial in chosen.items()
    ]
    _run(own, scarce, store)
    for method, trial in chosen.items():
        print(f"{METHODS[method]}: {trial.options}, {trial.training}")
    found = {each.key: each for each in [*others, *store]}
    print(tabulate([found[cell.key] for cell in [*compared, *own] if cell.key in found]).markdown())


def list_trials(cells: Iterable[Cell]) -> list[Cell]:
    """The relatives' trials in the settings of other methods' ones."""
    return [
        msgspec.structs.replace(cell, method=method, options=trial.options, training=trial.training)
        for cell in {cell.setting: cell for cell in cells}.values()
        for method in RELATIVES
        for trial in tuning.trials(method, cell.training)
    ]


def is_compared(cell: Cell) -> bool:
    """Whether it is the one setting's, and no method's with fewer rounds than it has by default."""
    setting = cell.setting
    here = (setting.partition, setting.samples, setting.classes_per_node) == (
        "disjoint",
        SAMPLES,
        CLASSES,
    )
    return here and not cell.pooled and cell.rounds not in (3, 6)


def _run(cells: Sequence[Cell], grid: Grid[Cell, Finished], store: Records[Finished]) -> None:
    done = {each.key for each in store}
    missing = [cell for cell in cells if cell.key not in done]
    inputs = grid.inputs(missing)
    for number, cell in enumerate(missing, 1):
        finished = run_cell(cell, inputs)
        store.add(finished)
        print(
            f"{number}/{len(missing)} {cell.method} {cell.setting.dataset} {finished.seconds} s",
            flush=True,
        )


def tabulate(finished: Sequence[Finished]) -> Table:
    """Each method's entry for each data set and view, in brackets the number of seeds."""
    grouped: Mapping[str, dict[str, list[Finished]]] = defaultdict(lambda: defaultdict(list))
    for each in finished:
        grouped[each.cell.method][each.cell.setting.dataset].append(each)
    datasets = sorted({each.cell.setting.dataset for each in finished})
    columns = [
        "method",
        "rounds",
        *(f"{dataset}, {view}" for dataset in datasets for view in VIEWS),
    ]
    rows = [
        [METHODS[method], str(next(iter(runs.values()))[0].cell.rounds)]
        + [_entry(runs[dataset], view) for dataset in datasets for view in VIEWS.values()]
        for method, runs in sorted(grouped.items(), key=lambda item: rank(item[0]))
    ]
    return Table("Relatives that train", columns, rows)


def _entry(runs: Sequence[Finished], view: Metric) -> str:
    return (
        format_spread([100 * each.mean(view) for each in runs]) + f" [{len(runs)}]" if runs else ""
    )


if __name__ == "__main__":
    main()
