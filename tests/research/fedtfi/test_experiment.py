"""`python -m research fedtfi`: data as sources,
cells that say what a shared model reached, tuning, tables.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET
from PIL import Image
from rich.console import Console

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Training
from research.__main__ import RESULTS
from research.fedtfi import data, tuning, variants
from research.fedtfi.cell import Cell, Finished, Point
from research.fedtfi.experiment import FEDTFI, FedTFIOrder, report
from research.fedtfi.grids import COMPARISONS, TUNE, Plan, grid, tuned
from research.fedtfi.presets import BOTH_1, BOTH_2, FEATURE, LABEL, PRESETS, Study
from research.fedtfi.run import run_cell, take_shares
from research.fedtfi.variants import Variant
from research.pretraining.texture_patterns import texture
from research.runner.experiment import Experiment
from research.runner.machine import TORCH
from research.runner.processes import attempt
from research.runner.store import Records
from tests.support.paths import REPOSITORY
from tests.support.research_command import research
from trainer import progress
from trainer.data.class_folders import merge
from trainer.data.drawn_surfaces import draw_photographs, draw_style
from trainer.data.partition import select_pool
from trainer.models import backbones
from trainer.seeding import generator
from trainer.training.engine import SGD_MOMENTUM
from trainer.training.evaluation import macro_auc

pytestmark = pytest.mark.slow

FABRICS = ("corduroy", "cotton", "linen", "wool")
PIECES = ("sample_a", "sample_b", "sample_c", "sample_d")
SEED = 5
SGD = PRESETS["sgd"].training


@pytest.fixture(scope="module")
def kth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four kinds of drawn texture, 24 views of each of four pieces: seen by four cameras."""
    folder = tmp_path_factory.mktemp("kth")
    for number, piece in enumerate(PIECES):
        for kind, name in enumerate(FABRICS):
            random = generator(SEED, piece, name)
            (folder / piece / name).mkdir(parents=True)
            for view, pixels in enumerate(
                draw_photographs(random, draw_style(SEED, number), 24, 64, texture(SEED, kind))
            ):
                Image.fromarray(pixels).save(folder / piece / name / f"{view}.png")
    return folder


@pytest.fixture(scope="module")
def sources(kth: Path) -> tuple[data.Catalogue, ...]:
    return data.read({"kth": kth})["kth"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset for drawn textures: two rounds of a few images."""
    study = Study(
        nodes=8, samples=4, test_samples=2, shared=1, scenarios=(LABEL, FEATURE, BOTH_1, BOTH_2)
    )
    training = Training(local_epochs=1, batch_size=4, augment=False)
    preset = PRESETS["quick"]._replace(training=training, rounds=2, seeds=1, studies={"kth": study})
    monkeypatch.setitem(PRESETS, "quick", preset)


@pytest.fixture
def order(kth: Path, tmp_path: Path, small: None) -> FedTFIOrder:
    return FedTFIOrder(
        name="fig9",
        preset="quick",
        data={"kth": kth},
        weights=["none"],
        store=tmp_path / "store",
        workers=1,
    )


def plan(preset: str = "cpu") -> Plan:
    """Of all data sets, whatever images they have."""
    models = {variant.model for variant in variants.tuned(PRESETS[preset])}
    images = {name: name * 8 for name in data.DATASETS}
    return Plan(PRESETS[preset], images, dict.fromkeys(models, "none"), TORCH)


def finished(cell: Cell, accuracy: float) -> Finished:
    """That reached this."""
    point = Point(round=cell.rounds, accuracy=accuracy, f1=accuracy, auc=accuracy, loss=0.5)
    return Finished(
        key=cell.key,
        cell=cell,
        classes=[],
        curve=[point],
        confusion=[],
        nodes=[],
        seconds=1.0,
        machine="test",
    )


# Data


def test_the_pieces_of_cloth_are_two_sources_with_the_same_classes(
    sources: tuple[data.Catalogue, ...],
) -> None:
    assert [source.classes for source in sources] == [list(FABRICS)] * 2
    pieces = [{entry.path.parent.parent.name for entry in source.entries} for source in sources]
    assert pieces == [set(PIECES[:2]), set(PIECES[2:])]


@pytest.fixture
def steel(kth: Path, tmp_path: Path) -> dict[str, Path]:
    """Folders of two plants, an image of each class."""
    names = {
        "neu": ("inclusion", "scratches", "rolled-in_scale", "crazing"),
        "xsdd": ("slag_inclusion", "surface_scratch", "oxide_scale_of_plate_system", "red_iron"),
    }
    names["xsdd"] += ("oxide_scale_of_temperature_system",)
    images = sorted(kth.glob("*/*/*.png"))
    for plant, classes in names.items():
        for name in classes:
            (tmp_path / plant / name).mkdir(parents=True)
            (tmp_path / plant / name / "1.png").write_bytes(images.pop().read_bytes())
    return {plant: tmp_path / plant for plant in names}


def test_of_two_plants_steel_only_defects_that_both_have_count_under_one_name(
    steel: dict[str, Path],
) -> None:
    neu, xsdd = data.read(steel)["steel"]
    assert neu.classes == xsdd.classes == ["inclusion", "rolled-in_scale", "scratches"]
    assert (len(neu.entries), len(xsdd.entries)) == (3, 4)


@pytest.mark.parametrize(
    ("folders", "hint"),
    [({}, "--data NAME"), ({"neu": Path()}, "--data xsdd="), ({"kht": Path()}, "kth")],
)
def test_data_that_is_lacking_or_unknown_is_refused_with_a_remedy(
    folders: dict[str, Path], hint: str, order: FedTFIOrder
) -> None:
    with pytest.raises(UsageError) as refused:
        Experiment(FEDTFI, replace(order, data=folders), progress.ignore)
    assert hint in refused.value.remedy


def test_a_preset_without_an_experiment_for_the_data_says_what_it_takes(
    order: FedTFIOrder, steel: dict[str, Path]
) -> None:
    with pytest.raises(UsageError, match="pieces") as refused:
        Experiment(FEDTFI, replace(order, preset="pieces", data=steel), progress.ignore)
    assert refused.value.remedy == "pass --data kth=FOLDER"


@pytest.mark.parametrize(
    ("below", "hint"), [("", ""), ("sample_a", ", perhaps {kth}"), ("nowhere", "")]
)
def test_fabrics_are_looked_for_in_the_folder_above_the_pieces(
    below: str, hint: str, kth: Path, tmp_path: Path
) -> None:
    folder = kth / below if below else tmp_path
    with pytest.raises(UsageError, match=rf"kth.*{folder}/sample_a") as refused:
        data.read({"kth": folder})
    expected = (
        "pass the folder that holds sample_a to sample_d as --data "
        f"kth=FOLDER{hint.format(kth=kth)}"
    )
    assert refused.value.remedy == expected


# Grids


def test_a_cells_key_hangs_on_all_that_it_depends_on() -> None:
    cell = grid("table2", plan())[0].cell
    others = [
        msgspec.structs.replace(cell, seed=1),
        msgspec.structs.replace(cell, embed=True),
        msgspec.structs.replace(cell, setting=msgspec.structs.replace(cell.setting, shared=9)),
    ]
    assert len({each.key for each in (cell, *others)}) == 4
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell).key == cell.key


def test_what_the_cpu_has_trained_is_found_as_before_there_was_a_choice() -> None:
    cell = grid("table2", plan())[0].cell
    assert b"cuda" not in msgspec.json.encode(cell)
    on_gpu = grid("table2", plan()._replace(device="cuda"))[0].cell
    assert (cell.device, on_gpu.device) == ("cpu", "cuda")
    assert cell.key != on_gpu.key


def test_what_adam_has_trained_is_found_as_before_there_was_a_choice() -> None:
    stored = [*Records(REPOSITORY / RESULTS / "fedtfi" / "cells.jsonl", Finished)]
    assert [each.key for each in stored] == [each.cell.key for each in stored]
    cell = stored[0].cell
    assert cell.key != msgspec.structs.replace(cell, training=SGD).key


@pytest.mark.parametrize("name", COMPARISONS)
def test_all_whom_an_experiment_compares_have_the_same_images_rounds_and_epochs(name: str) -> None:
    entries = grid(name, plan())
    for seed in {entry.cell.seed for entry in entries}:
        for place in {(entry.cell.setting.data, entry.scenario) for entry in entries}:
            cells = [
                e.cell
                for e in entries
                if (e.cell.setting.data, e.scenario, e.cell.seed) == (*place, seed)
            ]
            assert len(cells) == len(COMPARISONS[name].variants(plan().preset))
            assert len({msgspec.structs.replace(cell.setting, shared=0) for cell in cells}) == 1
            budgets = {
                (cell.rounds, cell.training.local_epochs * (1 + (cell.method == "afedcl")))
                for cell in cells
            }
            assert len(budgets) == 1
            assert not any(cell.training.augment for cell in cells)


def test_figures_have_their_scenario_also_where_tables_leave_it_out() -> None:
    assert {entry.scenario for entry in grid("fig7", plan("quick"))} == {LABEL}
    assert {entry.scenario for entry in grid("table2", plan("quick"))} == {FEATURE, BOTH_1}


def test_whole_pieces_are_held_out_of_the_classes_that_a_node_has(kth: Path) -> None:
    pieces = data.read({"kth": kth})["pieces"]
    study = Study(nodes=8, samples=4, test_samples=2, shared=0, scenarios=(FEATURE, BOTH_1))
    made = plan("pieces")._replace(
        preset=PRESETS["pieces"]._replace(studies={"pieces": study}, seeds=3)
    )
    for entry in grid("fig6", made) + grid("leak", made):
        for number, share in enumerate(take_shares(entry.cell, pieces)):
            trained, held_out = (
                {e.path.parent.parent.name for e in side.entries} for side in share[1:]
            )
            assert (trained, held_out) == [
                ({"sample_a"}, {"sample_b"}),
                ({"sample_c"}, {"sample_d"}),
            ][number % 2]
            assert share.train.classes == share.test.classes


def test_three_defects_are_not_dealt_by_twos() -> None:
    places = {(entry.cell.setting.data, entry.scenario) for entry in grid("table2", plan())}
    assert ("kth", BOTH_2) in places
    assert ("steel", BOTH_2) not in places


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_cells_for_every_experiment(preset: str) -> None:
    for name in (TUNE, *COMPARISONS):
        assert grid(name, plan(preset))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["table4", "fig9", "fig10"])
def test_what_a_part_is_worth_is_told_by_networks_of_one_scale(name: str, preset: str) -> None:
    assert len({entry.cell.size for entry in grid(name, plan(preset))}) == 1


# Tuning


@pytest.mark.parametrize("preset", ["cpu", "sgd"])
@pytest.mark.parametrize("variant", variants.tuned(PRESETS["cpu"]), ids=str)
def test_every_variant_has_the_same_number_of_different_trials(
    variant: Variant, preset: str
) -> None:
    trials = tuning.trials(variant, PRESETS[preset].training)
    assert len({str(trial) for trial in trials}) == 3


@pytest.mark.parametrize("variant", variants.table2(PRESETS["sgd"]).values(), ids=str)
def test_with_the_papers_optimiser_all_try_the_same_steps_and_momentum(variant: Variant) -> None:
    """FedNova's SGD is its own, which has no weight decay."""
    steps = {
        each.options.get("rate", each.training.learning_rate)
        for each in tuning.trials(variant, SGD)
    }
    assert steps == {0.003, 0.01, 0.03}
    assert {each.options.get("momentum", SGD_MOMENTUM) for each in tuning.trials(variant, SGD)} == {
        0.9
    }
    assert all(each.training.optimizer == "sgd" for each in tuning.trials(variant, SGD))


def test_the_best_trial_of_each_scenario_is_taken_for_scenarios_like_it() -> None:
    whole = plan()
    cells = {(entry.variant, entry.scenario): [] for entry in grid(TUNE, whole)}
    for entry in grid(TUNE, whole):
        cells[entry.variant, entry.scenario].append(entry.cell)
    best = {FEATURE: 1, BOTH_1: 2}
    results = [
        finished(cell, 0.9 if number == best[scenario] else 0.3)
        for (_, scenario), each in cells.items()
        for number, cell in enumerate(each)
    ]
    whole = whole._replace(tuned=tuned("table2", whole, results))
    fedtfi = variants.table2(whole.preset)["FedTFI"]
    expected = tuning.trials(fedtfi, whole.preset.training)
    assert whole.trial(fedtfi, FEATURE) == expected[1]
    for scenario in (LABEL, BOTH_1, BOTH_2):
        assert whole.trial(fedtfi, scenario) == expected[2]


def test_as_long_as_one_is_not_tuned_all_have_their_defaults() -> None:
    results = [
        finished(entry.cell, 0.5)
        for entry in grid(TUNE, plan())
        if not entry.variant.startswith("FedNova")
    ]
    assert tuned("table2", plan(), results) == {FEATURE: {}, BOTH_1: {}}
    assert all(tuned("table4", plan(), results).values())


def test_tuning_looks_at_no_image_of_a_report(sources: tuple[data.Catalogue, ...]) -> None:
    assert {entry.cell.setting.pool for entry in grid(TUNE, plan())} == {"tuning"}
    images = merge(sources)
    assert not {e.digest for e in select_pool(images, "tuning").entries} & {
        e.digest for e in select_pool(images, "report").entries
    }
    pools = {
        name: {entry.cell.setting.pool for entry in grid(name, plan())} for name in COMPARISONS
    }
    assert pools == {name: {"tuning" if name == "negatives" else "report"} for name in COMPARISONS}


# Running


def test_an_experiment_runs_goes_on_where_it_was_and_tells(order: FedTFIOrder) -> None:
    first = Experiment(FEDTFI, order, progress.ignore)
    assert len(first.cells) == 2
    inputs = first.inputs(first.cells)
    left, right = (run_cell(cell, inputs) for cell in first.cells)
    records = Records(order.store / "cells.jsonl", Finished)
    records.add(left)
    again = Experiment(FEDTFI, order, progress.ignore)
    assert again.missing() == [right.cell]
    records.add(right)
    assert again.state().missing == 0
    for found in (left, right):
        assert [point.round for point in found.curve] == [1, 2]
        assert np.sum(found.confusion) == sum(node.tested for node in found.nodes) == 32
        assert found.curve[-1].accuracy == round(np.trace(found.confusion) / 32, 4)
        assert found.embedding is not None
        assert sorted(set(found.embedding.sources)) == sorted(data.DATASETS["kth"].sources)
    assert msgspec.structs.replace(
        run_cell(left.cell, inputs), seconds=0
    ) == msgspec.structs.replace(left, seconds=0)
    table, figure = again.report(Console(quiet=True))
    assert f"| {left.curve[-1].loss:.3f} |" in table.read_text()
    assert figure.suffix == ".svg"


def test_where_no_classifier_is_shared_the_nodes_own_models_count(order: FedTFIOrder) -> None:
    made = Experiment(FEDTFI, replace(order, name="fuse", rounds=1), progress.ignore)
    cell = next(cell for cell in made.cells if cell.method == "fedper")
    found = run_cell(cell, made.inputs([cell]))
    assert not found.curve
    assert (
        found.accuracy
        == found.personal
        == pytest.approx(np.mean([node.accuracy for node in found.nodes]))
    )


def test_a_consensus_head_is_each_nodes_own_and_judged_on_all_held_out_images(
    order: FedTFIOrder,
) -> None:
    made = Experiment(FEDTFI, replace(order, name="consensus"), progress.ignore)
    cell = next(cell for cell in made.cells if cell.head and cell.method == "fedtfi")
    trained = next(each for each in made.cells if each == msgspec.structs.replace(cell, head=UNSET))
    found = run_cell(cell, made.inputs([cell]))
    assert len(found.heads) == cell.setting.nodes
    assert found.accuracy == pytest.approx(np.mean(found.heads))
    # images
    assert all(32 * each == pytest.approx(round(32 * each), abs=0.01) for each in found.heads)
    # the head changes nothing of the training
    assert found.curve == run_cell(trained, made.inputs([trained])).curve


def test_a_consensus_head_takes_the_trials_of_the_classifier_in_its_place() -> None:
    entries = {
        (entry.variant, entry.scenario, entry.cell.seed): entry.cell
        for entry in grid("consensus", plan())
    }
    heads = {place: cell for place, cell in entries.items() if cell.head}
    assert len(heads) == len(entries) / 2
    for (name, *place), cell in heads.items():
        assert entries[name.removesuffix(", consensus head"), *place] == msgspec.structs.replace(
            cell, head=UNSET
        )


def test_what_goes_wrong_with_a_cell_is_told_and_not_stored(order: FedTFIOrder) -> None:
    made = Experiment(FEDTFI, order, progress.ignore)
    cell = msgspec.structs.replace(made.cells[0], torch="0.1")
    failed = attempt(run_cell, cell, made.inputs([cell]))
    assert "torch 0.1" in failed.error


# Tables


def test_a_table_has_ours_beside_the_papers_and_the_differences() -> None:
    entries = grid("table2", plan())
    found = {
        entry.cell.key: finished(
            entry.cell, (0.8 if entry.variant == "FedTFI" else 0.7) + 0.01 * entry.cell.seed
        )
        for entry in entries
    }
    written = report("table2", entries, found).markdown("")
    assert "| FedTFI | 81.0 ± 1.0<br>paper 75.5 | 81.0 ± 1.0<br>paper 92.4 |" in written
    assert "| FedAvg, DEPNet | 71.0 ± 1.0<br>paper 58.4 / 62.3 |" in written
    assert "| FedNova, CU-NET | +10.0 ± 0.0 |" in written


def test_a_grid_of_which_little_is_finished_is_compared_with_fedtfi_all_the_same() -> None:
    """Its first scenario had FedTFI and one other only:
    who came first in the next was taken for the last.
    """
    entries = grid("table2", plan())
    first = entries[0].scenario
    some = [
        each
        for each in entries
        if each.scenario != first or each.variant in ("FedAvg, Deep-TEN", "FedTFI")
    ]
    found = {
        each.cell.key: finished(each.cell, 0.8 if each.variant == "FedTFI" else 0.7)
        for each in some
    }
    written = report("table2", entries, found).markdown("")
    assert ": FedTFI minus each of the others, points" in written
    assert "| FedNova, CU-NET | - | +10.0" in written
    assert "| FedAvg, Deep-TEN | +10.0" in written


def test_areas_under_curves_are_averaged_over_the_classes_that_occur() -> None:
    labels = np.array([0, 0, 1, 1])
    shares = np.array([[0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.3, 0.7, 0.0], [0.8, 0.2, 0.0]])
    assert macro_auc(shares, labels) == pytest.approx(0.75)
    assert np.isnan(macro_auc(shares[:2], labels[:2]))


# The command


def test_weights_out_of_reach_are_told_before_any_cell_starts(
    order: FedTFIOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(backbones, "can_download", asked.append)
    with pytest.raises(UsageError, match="ImageNet") as refused:
        Experiment(FEDTFI, replace(order, name="table2", weights=["imagenet"]), progress.ignore)
    assert "--weights none or a FILE.safetensors of VGG19's first layers" in refused.value.remedy
    monkeypatch.setattr(backbones, "can_download", lambda model: asked.append(model) or True)
    asked.clear()
    Experiment(FEDTFI, replace(order, name="table2", weights=["imagenet"]), progress.ignore)
    assert len(asked) == 1  # all begin with the same file


def test_a_folder_without_its_name_is_answered_with_an_example_that_fits(kth: Path) -> None:
    refused = research("fedtfi", "table2", "--data", kth)
    assert f"write for example --data kth={kth}" in refused.stderr


def test_the_command_refuses_what_has_nothing_to_act_on(kth: Path) -> None:
    refused = research("fedtfi", "table2", "--data", f"kth={kth}", "--model", "small")
    assert refused.returncode == 2
    assert "No such option: --model" in refused.stderr


def test_without_a_gpu_nothing_begins_on_one(kth: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    refused = research(
        "fedtfi",
        "table2",
        "--data",
        f"kth={kth}",
        "--weights",
        "none",
        "--store",
        tmp_path,
        "--device",
        "cuda",
    )
    assert refused.returncode == 2
    assert "leave out --device" in refused.stderr
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_says_what_is_left(kth: Path, tmp_path: Path, small: None) -> None:
    told = research(
        "fedtfi",
        "table4",
        "--data",
        f"kth={kth}",
        "--weights",
        "none",
        "--store",
        tmp_path,
        "--dry-run",
    )
    assert "0 of 10 cells finished" in told.stdout
