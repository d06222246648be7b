"""Tables of experiments: numbers worked out by hand, rows and columns as the paper has them."""

from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from broker_config.protocol.messages import Training
from research.afedcl import labels
from tests.support.afedcl_tables import row, shown
from tests.support.finished_cells import NEU, finished, scattered

DIRICHLET = replace(NEU, partition="dirichlet")
LARGER = replace(NEU, samples=20)
TUNING = replace(NEU, pool="tuning")
NOT_STORED = ["not stored", "not stored"]  # own and all


def test_an_entry_is_mean_deviation_and_f1_beside_the_papers_number(tmp_path: Path) -> None:
    text = shown(
        "table2",
        [finished("fedavg", value, seed) for seed, value in enumerate((0.7, 0.8, 0.9))],
        tmp_path,
    )
    assert row(text, "NEU-CLS, disjoint", "FedAvg") == [
        "not run<br>paper 51.40 (62.83)",
        *("not stored", "not stored", "80.0 ± 10.0 (78.0)<br>paper 58.60 (70.89)"),
        "not run<br>paper 72.47 (80.86)",
    ]


def test_own_classes_and_all_of_them_stand_beside_the_papers_view(tmp_path: Path) -> None:
    seeds = enumerate(((0.9, 0.5), (0.8, 0.4)))
    cells = [
        finished("fedavg", 0.7, seed, own=own, everyone=everyone) for seed, (own, everyone) in seeds
    ]
    text = shown("table2", [*cells, finished("afedcl", 0.6), finished("afedcl", 0.6, 1)], tmp_path)
    table = text.split("## NEU-CLS, disjoint\n")[1]
    heads = [f"10 images a node: {view}" for view in ("own", "all", "paper's view")]
    assert [each.strip() for each in table.strip().splitlines()[0].split("|")[3:6]] == heads
    assert row(text, "NEU-CLS, disjoint", "FedAvg")[1:4] == [
        "85.0 ± 7.1",
        "45.0 ± 7.1",
        "70.0 ± 0.0 (68.0)<br>paper 58.60 (70.89)",
    ]
    assert row(text, "NEU-CLS, disjoint", "AFedCL")[1:3] == ["not stored", "not stored"]


def test_a_view_that_one_node_lacks_is_not_stored(tmp_path: Path) -> None:
    cell = finished("fedavg", 0.7, own=0.9, everyone=0.5)
    nodes = [replace(cell.nodes[0], own=UNSET), *cell.nodes[1:]]
    assert row(
        shown("table2", [replace(cell, nodes=nodes)], tmp_path), "NEU-CLS, disjoint", "FedAvg"
    )[1:3] == ["not stored", "50.0"]


def test_table_ii_has_all_methods_and_data_sets_of_the_paper_even_before_they_are_run(
    tmp_path: Path,
) -> None:
    text = shown(
        "table2",
        [finished("fedbn", 0.8), finished("afedcl", 0.9, options={"lambda": 0.1})],
        tmp_path,
    )
    table = text.split("## GC10-DET, Dirichlet\n")[1].split("\n## ")[0]
    names = [line.split("|")[1].strip() for line in table.strip().splitlines()[2:]]
    assert names == [
        "No-FL",
        "FedAvg",
        "FedProx",
        "FedBN",
        "FedPer",
        "FedRep",
        "Ditto",
        "FedALA",
        "AFedCL",
    ]
    assert row(text, "GC10-DET, Dirichlet", "AFedCL")[0] == "not run<br>paper 80.46 (75.74)"
    # not in the paper
    assert row(text, "NEU-CLS, disjoint", "FedBN")[2:] == ["not stored", "80.0 (78.0)", "not run"]
    assert "GC10-DET is not run: its images could not be had." in text


def test_gc10_det_is_not_excused_once_it_has_been_run(tmp_path: Path) -> None:
    assert "could not be had" not in shown(
        "table2", [finished("local", 1, setting=replace(NEU, dataset="GC10-DET"))], tmp_path
    )


def test_every_method_is_compared_with_afedcl_by_paired_differences(tmp_path: Path) -> None:
    cells = [finished("local", value, seed) for seed, value in enumerate((0.8, 0.4, 0.5))]
    cells += [finished("afedcl", value, seed) for seed, value in enumerate((0.9, 0.6, 0.8))]
    title = (
        "NEU-CLS, disjoint: AFedCL minus each other, percentage points, paired by seed, 95 % "
        "interval"
    )
    found = row(shown("table2", cells, tmp_path), title, "No-FL")
    assert found == ["no pair", "no pair", "+20.0 ± 24.8"]  # 4.3027 * 10 / sqrt(3)


def test_every_method_is_compared_with_training_alone_in_each_view(tmp_path: Path) -> None:
    cells = [finished("local", 0.5, seed, own=0.8, everyone=0.3) for seed in range(3)]
    cells += [finished("fedavg", 0.4, seed, own=0.9, everyone=0.5) for seed in range(3)]
    cells += [finished("afedcl", 0.5, seed, own=0.7, everyone=0.3) for seed in range(3)]
    title = "NEU-CLS, disjoint: each minus No-FL, percentage points, paired by seed, 95 % interval"
    text = shown("table2", cells, tmp_path)
    assert row(text, title, "FedAvg") == ["+10.0 ± 0.0", "+20.0 ± 0.0", "-10.0 ± 0.0"]
    assert row(text, title, "AFedCL") == ["-10.0 ± 0.0", "+0.0 ± 0.0", "+0.0 ± 0.0"]


def test_fewer_seeds_are_marked_and_left_out_of_comparisons(tmp_path: Path) -> None:
    cells = [*scattered(["local", "afedcl"], 3), *scattered(["fedavg"], 2)]
    text = shown("table2", cells, tmp_path)
    assert "[2]" in row(text, "NEU-CLS, disjoint", "FedAvg")[3]
    title = (
        "NEU-CLS, disjoint: AFedCL minus each other, percentage points, paired by seed, 95 % "
        "interval"
    )
    assert row(text, title, "FedAvg")[2].endswith(" [2]")
    assert not row(text, title, "No-FL")[2].endswith("]")
    assert "Fewer than 3 seeds: FedAvg in NEU-CLS, disjoint, 10 images a node (2)." in text
    assert (
        "over 2 settings and seeds; 1 more lack a method and are left out. Its 95 % "
        "intervals take these as"
    ) in text


def test_means_differences_and_ranks_over_all_settings_and_seeds(tmp_path: Path) -> None:
    ranked = {NEU: (0.9, 0.8, 0.7), DIRICHLET: (0.5, 0.6, 0.7), LARGER: (0.7, 0.7, 0.7)}
    cells = [
        finished(method, value, setting=setting, own=value + 0.1, everyone=0.5)
        for setting, values in ranked.items()
        for method, value in zip(("local", "ditto", "afedcl"), values, strict=True)
    ]
    cells += [
        replace(each, cell=(cell := replace(each.cell, seed=1)), key=cell.key) for each in cells
    ]  # a second seed of a setting tells nothing of other settings
    text = shown("fig9", cells, tmp_path)
    # fig9 shows each twice
    assert "over 6 settings and seeds. Its 95 % intervals take settings as blocks." in text
    # Differences -10, +10 and 0: mean 0, deviation 10, t = 4.303 with two degrees of freedom: 4.303
    # * 10 / sqrt(3).
    # AFedCL is ahead of Ditto by -10, +10 and 0, and of No-FL by -20, +20 and 0.
    assert row(text, "Over all settings and seeds", "Ditto") == [
        "80.0",
        "+0.0 ± 24.8",
        "+0.0 ± 24.8",
        "2.00",
        "50.0",
        "+0.0 ± 0.0",
        "+0.0 ± 0.0",
        "2.00",
        "70.0",
        "+0.0 ± 24.8",
        "+0.0 ± 24.8",
        "2.00",
    ]
    assert row(text, "Over all settings and seeds", "No-FL")[:4] == [
        "80.0",
        "",
        "+0.0 ± 49.7",
        "2.00",
    ]
    assert row(text, "Over all settings and seeds", "AFedCL")[:4] == [
        "80.0",
        "+0.0 ± 49.7",
        "",
        "2.00",
    ]
    short = [each for each in cells if each.cell.setting != LARGER or each.cell.method == "local"]
    assert (
        "over 4 settings and seeds; 2 more lack a method and are left out. Its 95 % "
        "intervals take these as"
    ) in shown("fig9", short, tmp_path)


def test_the_conditions_stand_above_the_tables(tmp_path: Path) -> None:
    text = shown("fig10", scattered(["afedcl"], 2), tmp_path)
    assert "Seeds 0, 1; 4 rounds; 96 px; mobilenet_v2; weights 5eed5eed; torch 2.13.0." in text


def test_fig4_compares_the_variants_and_tells_the_papers_numbers(tmp_path: Path) -> None:
    cells = [
        finished("afedcl", 0.5 + lam, seed, options={"lambda": lam})
        for lam in (0.0, 0.1)
        for seed in range(2)
    ]
    text = shown("fig4", cells, tmp_path)
    assert (
        row(text, "NEU-CLS, disjoint", "AFedCL without adversarial update")[2]
        == "50.0 ± 0.0 (48.0)"
    )
    assert row(text, "NEU-CLS, disjoint", "AFedCL")[2] == "60.0 ± 0.0 (58.0)"
    assert "54.68 % for AFedCL without adversarial update and 70.75 % for AFedCL" in text


def test_fig8_has_a_column_for_each_lambda(tmp_path: Path) -> None:
    cells = [
        finished(method, 0.5 + lam / 10, options={"lambda": lam})
        for method in ("ditto", "afedcl")
        for lam in (1.0, 0.01)
    ]
    text = shown("fig8", cells, tmp_path)
    assert (
        "|  | lambda 0.01: own | lambda 0.01: all | lambda 0.01: paper's view | lambda 1: own |"
        in text
    )
    assert row(text, "NEU-CLS, disjoint, 10 images a node", "Ditto")[2::3] == [
        "50.1 (48.1)",
        "60.0 (58.0)",
    ]


def test_fig9_has_networks_and_then_numbers_of_nodes(tmp_path: Path) -> None:
    cells = [
        finished("afedcl", 0.6, model=model) for model in ("mobilenet_v2", "resnet18", "resnet50")
    ]
    cells += [
        finished("afedcl", 0.7, setting=replace(NEU, nodes=k, samples=n))
        for k, n in ((2, 25), (10, 5))
    ]
    text = shown("fig9", cells, tmp_path)
    found = [
        row(text, f"NEU-CLS, disjoint, {images}", "")[::3]
        for images in ("10 images a node", "50 images in all")
    ]
    assert found == [
        ["mobilenet_v2: own", "resnet18: own", "resnet50: own"],
        ["2 nodes: own", "5 nodes: own", "10 nodes: own"],
    ]
    figures = row(text, "NEU-CLS, disjoint, 50 images in all", "AFedCL")[2::3]
    assert figures == ["70.0 (68.0)", "60.0 (58.0)", "70.0 (68.0)"]


def test_tuning_tells_each_methods_trials_and_its_best(tmp_path: Path) -> None:
    cells = [
        finished("local", accuracy, seed, setting=TUNING, training=Training(learning_rate=rate))
        for rate, accuracies in ((1e-3, (0.5, 0.6)), (2e-4, (0.7, 0.6)))
        for seed, accuracy in enumerate(accuracies)
    ]
    cells += [
        finished("afedcl", 0.9, seed, setting=TUNING, options={"lambda": lam})
        for lam in (0.1, 1)
        for seed in (0, 1)
    ]
    text = shown("tune", cells, tmp_path)
    assert row(text, "Best trials", "No-FL") == ["2", "learning_rate 0.0002", "65.0"]
    assert row(text, "Best trials", "AFedCL")[0] == "2"
    assert "equal chances" not in text
    assert "report pool" not in text


def test_tuning_says_when_chances_were_unequal_or_the_pool_was_wrong(tmp_path: Path) -> None:
    cells = [
        finished("local", 0.5),
        finished("ditto", 0.5, options={"lambda": 1}),
        finished("ditto", 0.6, options={"lambda": 2}),
    ]
    text = shown("tune", cells, tmp_path)
    assert "not yet equal chances" in text
    assert "report pool" in text


def test_a_trial_that_is_not_finished_is_not_the_best(tmp_path: Path) -> None:
    cells = [
        finished("ditto", 0.6, seed, setting=TUNING, options={"lambda": 0.1}) for seed in (0, 1)
    ]
    cells += [finished("ditto", 0.9, 0, setting=TUNING, options={"lambda": 1.0})]
    assert row(shown("tune", cells, tmp_path), "Best trials", "Ditto") == [
        "2",
        "lambda 0.1",
        "60.0",
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lambda": 0.1, "weights": "discrimination", "fusion": "adaptive"}, "AFedCL"),
        ({"lambda": 0.0}, "AFedCL without adversarial update"),
        (
            {"weights": "equal", "fusion": "none"},
            "AFedCL without consensus-aware weights and fusion",
        ),
        (
            {"lambda": 0, "weights": "equal", "fusion": "none"},
            "AFedCL without adversarial update, consensus-aware weights and fusion",
        ),
    ],
)
def test_a_variant_is_named_by_what_it_lacks(options: dict[str, object], name: str) -> None:
    assert labels.label(finished("afedcl", 0.5, options=options).cell) == name  # type: ignore[arg-type]


def test_variants_that_nothing_else_tells_apart_are_named_by_what_they_differ_in(
    tmp_path: Path,
) -> None:
    cells = [
        finished("fedavg", 0.5 + epochs / 100, options={"epochs": epochs}) for epochs in (0, 6)
    ]
    cells += [
        finished("fedavg", 0.9, setting=DIRICHLET, options={"epochs": 6}),
        finished("somebodys", 0.1),
        finished("afedcl", 0.2),
    ]
    text = shown("fig10", cells, tmp_path)
    assert row(text, "NEU-CLS, disjoint", "FedAvg (epochs 3)") == [
        *NOT_STORED,
        "50.0 (48.0)",
    ]  # 0 = the spec's local_epochs
    assert row(text, "NEU-CLS, disjoint", "FedAvg (epochs 6)") == [*NOT_STORED, "56.0 (54.0)"]
    table = text.split("## NEU-CLS, disjoint\n")[1].split("\n## ")[0]
    assert [line.split("|")[1].strip() for line in table.strip().splitlines()[-2:]] == [
        "somebodys",
        "AFedCL",
    ]


def test_the_order_in_which_cells_finished_changes_nothing(tmp_path: Path) -> None:
    cells = [
        *scattered(["local", "afedcl"], 2),
        *scattered(["afedcl"], 2, options={"start": "carry"}),
    ]
    assert shown("table2", cells, tmp_path) == shown("table2", cells[::-1], tmp_path)


def test_factors_are_told_by_what_was_changed_with_the_difference_from_the_base(
    tmp_path: Path,
) -> None:
    stored = Training(learning_rate=2e-4, batch_norm="eval")
    cells = [
        finished(method, base + change, seed, setting=setting, training=training)
        for seed in (0, 1, 2)
        for method, base in (("afedcl", 0.8), ("local", 0.7))
        for setting, training, change in (
            (TUNING, None, 0.01 * seed),
            (TUNING, stored, -0.1 + 0.02 * seed),
            (replace(TUNING, samples=20), None, 0.1 + 0.01 * seed),
        )
    ]
    text = shown("factors", cells, tmp_path)
    assert row(text, "NEU-CLS, disjoint", "base") == ["81.0 ± 1.0 (79.0)", "71.0 ± 1.0 (69.0)"]
    # Differences -10, -9, -8: mean -9, deviation 1, t = 4.303 with two degrees of freedom: 4.303 /
    # sqrt(3) = 2.5.
    assert row(text, "NEU-CLS, disjoint", "batch_norm eval")[0] == "72.0 ± 2.0 (70.0)<br>-9.0 ± 2.5"
    assert row(text, "NEU-CLS, disjoint", "samples 20")[1] == "81.0 ± 1.0 (79.0)<br>+10.0 ± 0.0"
