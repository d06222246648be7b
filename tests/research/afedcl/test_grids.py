"""The grids of the paper's tables and figures: their federations, with which settings."""

from collections import Counter, defaultdict

import pytest

from broker_config.protocol.messages import Training
from research.afedcl.cell import Cell, Finished, NodeResult
from research.afedcl.grids import BASELINES, GRIDS, METHODS, PRESETS, RELATIVES, Plan
from research.afedcl.tuning import TRIALS, choose, trials
from research.runner.tuning import Trial
from trainer.methods import make

TRAINING = Training(learning_rate=2e-4, batch_norm="eval")


def plan(preset: str = "cpu", **fields: object) -> Plan:
    made = Plan(
        preset=PRESETS[preset],
        images={"neu": "0" * 64, "xsdd": "1" * 64},
        model="mobilenet_v2",
        encoder=lambda model, seed: f"{model}'s",
        backbones=("mobilenet_v2", "resnet18"),
        training=TRAINING,
        tuned={},
        torch="2.13.0",
    )
    return made._replace(**fields)


def finish(cell: Cell, accuracy: float) -> Finished:
    node = NodeResult(
        name="plant-1", trained={"a": 5}, tested=9, accuracy=accuracy, f1=accuracy, history={}
    )
    return Finished(key=cell.key, cell=cell, nodes=[node], seconds=1.0, machine="here")


def anything(cell: Cell) -> bool:
    return True


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", GRIDS)
def test_no_two_cells_of_a_grid_are_the_same(name: str, preset: str) -> None:
    keys = [cell.key for cell in GRIDS[name](plan(preset))]
    assert keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", GRIDS)
def test_every_method_has_the_same_budget_of_epochs(name: str) -> None:
    for cell in GRIDS[name](plan("full")):
        method = make(cell.method, cell.training, cell.options)
        if not (phases := (*method.train, *method.refine)):
            continue  # sums alone
        # FedALA's mixing weights, before it trains, and AFedCL's discriminator alone, afterwards,
        # move no network.
        training = [
            phase for phase in phases if phase.name not in ("adapt", "refitting", "evaluation")
        ]
        # Each step with noise is paid for.
        assert sum(phase.epochs for phase in training) == (1 if cell.privacy else 6), cell.method


def test_only_what_is_no_result_sees_the_tuning_pool_and_nothing_else() -> None:
    pools = {name: {cell.setting.pool for cell in grid(plan())} for name, grid in GRIDS.items()}
    # where defaults are chosen
    for choosing in ("tune", "factors", "trained", "private_tune"):
        assert pools.pop(choosing) == {"tuning"}
    # a rule is chosen on the one, and shown on the other
    assert pools.pop("joining") == {"tuning", "report"}
    assert all(found == {"report"} for found in pools.values())


def test_the_table_has_every_method_in_every_setting_with_every_seed() -> None:
    cells = GRIDS["table2"](plan("full"))
    places = Counter((cell.setting, cell.seed) for cell in cells)
    assert len(places) == 2 * 2 * 3 * 5
    assert {cell.method for cell in cells} == set(METHODS)
    assert set(places.values()) == {len(METHODS)}


def test_an_interrupted_grid_has_all_methods_of_the_first_seeds() -> None:
    seeds = [cell.seed for cell in GRIDS["table2"](plan())]
    assert seeds == sorted(seeds)


def test_the_figures_vary_what_they_are_about() -> None:
    def found(name: str, what: str) -> set[object]:
        return {cell.options.get(what) for cell in GRIDS[name](plan()) if cell.method == "afedcl"}

    assert Counter(
        (cell.options["lambda"], cell.options["start"])
        for cell in GRIDS["fig4"](plan())
        if not cell.seed
    ) == {(lam, start): 2 for lam in (0.1, 0.0) for start in ("global", "carry")}
    assert found("fig5", "start") == {"global", "carry"}
    assert found("fig8", "lambda") == {0.01, 0.1, 1.0}
    assert found("fig10", "weights") == {"discrimination", "equal"}
    assert found("fig10", "fusion") == {"adaptive", "none"}
    nodes = {(cell.setting.nodes, cell.setting.samples) for cell in GRIDS["fig9"](plan())}
    assert nodes == {(2, 25), (5, 10), (10, 5)}
    assert {cell.model for cell in GRIDS["fig9"](plan())} == {"mobilenet_v2", "resnet18"}
    assert {cell.setting.dataset for cell in GRIDS["fig7"](plan())} == {"NEU-CLS"}


def test_plants_with_few_images_meet_every_baseline_in_every_setting() -> None:
    cells = GRIDS["scarce"](plan("full"))
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    most = {cell.method: cell.rounds for cell in cells}
    assert most["gaussian"] == 1
    assert most["afedcl_plus"] < most["fedavg"]
    places = defaultdict(Counter)
    for cell in cells:
        if cell.method != "afedcl_plus" or cell.rounds == 12:
            places[cell.setting, cell.seed]["one place" if cell.pooled else cell.method] += 1
    assert len(places) == 2 * 9 * 5
    assert all(
        found == Counter((*BASELINES, "gaussian", "afedcl_plus", "one place"))
        for found in places.values()
    )


def test_around_a_setting_one_thing_is_changed_at_a_time() -> None:
    cells = GRIDS["around"](plan())
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert {cell.rounds for cell in cells if cell.method == "afedcl_plus"} == {12}
    changed = Counter(
        tuple(
            name
            for name, differs in {
                "images": cell.setting.samples != 5,
                "classes": cell.setting.classes_per_node != 3,
                "plants": cell.setting.nodes != 5,
                "pixels": cell.size != 64,
                "encoder": cell.model != "mobilenet_v2",
            }.items()
            if differs
        )
        for cell in cells
        if cell.seed == 0
    )
    four = 2 * 4  # methods, of both data sets
    others = 2 * (2 + len(RELATIVES))  # those that only the unchanged setting has
    assert changed == {(): four + others} | {
        (name,): four for name in ("images", "classes", "plants", "pixels", "encoder")
    }


# Tuning


def test_every_method_has_the_same_number_of_different_trials() -> None:
    for method in (*METHODS, *RELATIVES):
        made = trials(method, TRAINING)
        assert len({(str(trial.options), trial.training) for trial in made}) == TRIALS
        assert {trial.training.batch_norm for trial in made} == {"train", "eval"}


def test_what_a_method_has_of_its_own_is_not_tied_to_the_learning_rate() -> None:
    pairs = {
        (trial.options["lambda"], trial.training.learning_rate)
        for trial in trials("ditto", TRAINING)
    }
    assert len(pairs) == TRIALS


def tuning(best: dict[str, int], cells: list[Cell]) -> list[Finished]:
    """Results in which, of each method, one trial is better than the others, which are equal."""
    results = []
    for cell in cells:
        number = trials(cell.method, TRAINING).index(Trial(cell.options, cell.training))
        results.append(finish(cell, 0.9 if number == best.get(cell.method) else 0.5))
    return results


def test_the_best_trial_of_each_method_is_taken_and_the_first_of_equals() -> None:
    chosen = choose(METHODS, TRAINING, tuning({"afedcl": 4}, GRIDS["tune"](plan())), anything)
    assert chosen["afedcl"] == trials("afedcl", TRAINING)[4]
    assert chosen["fedavg"] == trials("fedavg", TRAINING)[0]
    assert chosen.keys() == set(METHODS)


def test_no_method_is_tuned_before_all_are() -> None:
    cells = GRIDS["tune"](plan())
    last = [cell for cell in cells if cell.method != METHODS[-1]]
    assert choose(METHODS, TRAINING, tuning({}, last), anything) == {}


def test_trials_are_compared_where_most_of_them_are_finished() -> None:
    cells = GRIDS["tune"](plan())
    elsewhere = [cell for cell in cells if cell.setting != cells[0].setting]
    begun = tuning(
        {"afedcl": 4}, [cell for cell in cells if cell not in elsewhere] + elsewhere[::TRIALS]
    )
    assert choose(METHODS, TRAINING, begun, anything)["afedcl"] == trials("afedcl", TRAINING)[4]


def test_a_trial_that_failed_somewhere_is_not_taken() -> None:
    results = tuning({"afedcl": 4}, GRIDS["tune"](plan()))
    place = next(
        each for each in results if each.cell.method == "afedcl" and each.mean("accuracy") == 0.9
    )
    results.remove(place)
    assert choose(METHODS, TRAINING, results, anything)["afedcl"] == trials("afedcl", TRAINING)[0]


def test_other_cells_of_the_tuning_pool_change_no_choice() -> None:
    results = tuning({"afedcl": 4}, GRIDS["tune"](plan()))
    others = [finish(cell, 1.0) for cell in GRIDS["factors"](plan())]
    assert (
        choose(METHODS, TRAINING, [*results, *others], anything)["afedcl"]
        == trials("afedcl", TRAINING)[4]
    )


def test_what_the_report_pool_says_or_another_size_changes_no_choice() -> None:
    results = tuning({}, GRIDS["tune"](plan()))
    tempting = [
        finish(cell, 1.0)
        for cell in GRIDS["table2"](plan(tuned={"afedcl": trials("afedcl", TRAINING)[3]}))
    ]
    other = tuning({"afedcl": 2}, GRIDS["tune"](plan("full")))
    chosen = choose(METHODS, TRAINING, [*results, *tempting, *other], lambda cell: cell.size == 64)
    assert chosen["afedcl"] == trials("afedcl", TRAINING)[0]


def test_the_table_is_made_with_what_was_chosen() -> None:
    best = trials("afedcl", TRAINING)[2]
    cells = [
        cell for cell in GRIDS["table2"](plan(tuned={"afedcl": best})) if cell.method == "afedcl"
    ]
    assert {(cell.options["lambda"], cell.training) for cell in cells} == {
        (best.options["lambda"], best.training)
    }
