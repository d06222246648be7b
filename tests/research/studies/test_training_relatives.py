"""Relatives that train: where their trials are run, with which cells they stand,
how seeds become an entry.
"""

import msgspec

from research.afedcl.cell import Cell, Setting
from research.afedcl.tuning import TRIALS
from research.studies.training_relatives import RELATIVES, is_compared, list_trials, tabulate
from tests.support.finished_cells import NEU, finished
from trainer.methods import METHODS


def place(dataset: str, **fields: object) -> Setting:
    return msgspec.structs.replace(NEU, dataset=dataset, **fields)


def test_relatives_have_as_many_trials_as_the_others_in_the_same_places() -> None:
    places = [place("NEU-CLS", pool="tuning"), place("X-SDD", partition="dirichlet", pool="tuning")]
    others = [
        finished(method, 0.5, setting=each).cell
        for each in places
        for method in ("fedavg", "fedper")
    ]
    made = list_trials(others)
    assert set(RELATIVES) <= set(METHODS)
    assert len({cell.key for cell in made}) == len(made) == 2 * TRIALS * len(RELATIVES)
    assert {cell.setting for cell in made} == set(places)
    assert {cell.method for cell in made} == set(RELATIVES)


def test_compared_are_whole_runs_of_the_one_setting() -> None:
    five = place("NEU-CLS", samples=5, classes_per_node=3)

    def cell(setting: Setting = five, **fields: object) -> Cell:
        return msgspec.structs.replace(finished("fedavg", 0.5, setting=setting).cell, **fields)

    assert is_compared(cell(rounds=30))
    assert is_compared(cell(rounds=12))
    assert not is_compared(cell(rounds=6))
    assert not is_compared(cell(rounds=30, pooled=True))
    for other in ({"samples": 3}, {"classes_per_node": 2}, {"partition": "dirichlet"}):
        assert not is_compared(cell(msgspec.structs.replace(five, **other), rounds=30))


def test_an_entry_is_mean_and_deviation_over_seeds_and_says_how_many() -> None:
    runs = [
        finished(method, 0.1, seed, setting=place(dataset), own=own + seed / 10, everyone=0.5)
        for method, own in (("pfedfda", 0.7), ("local", 0.6))
        for dataset in ("NEU-CLS", "X-SDD")
        for seed in range(3)
    ]
    table = tabulate(runs[:-1])
    assert table.columns == [
        "method",
        "rounds",
        "NEU-CLS, own",
        "NEU-CLS, all",
        "X-SDD, own",
        "X-SDD, all",
    ]
    assert [row[0] for row in table.rows] == ["No-FL", "pFedFDA"]
    assert table.rows[0][2:] == [
        "70.0 ± 10.0 [3]",
        "50.0 ± 0.0 [3]",
        "65.0 ± 7.1 [2]",
        "50.0 ± 0.0 [2]",
    ]
    assert table.rows[1][2] == "80.0 ± 10.0 [3]"
