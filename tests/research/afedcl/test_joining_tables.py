"""Tables of what joining gives: gains and numbers of nodes by hand,
in each setting and for each rule.
"""

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from research.afedcl.cell import Finished, Setting
from research.afedcl.joining import MIXINGS, RULES, SIZES
from tests.support.afedcl_tables import row, shown
from tests.support.finished_cells import NEU, answering, finished

REPORT = replace(NEU, samples=6, classes_per_node=3)
TUNING = replace(REPORT, pool="tuning")


def duo(setting: Setting, *, alone: float, together: float) -> list[Finished]:
    """Two cells of five nodes that get these shares of 60 images right; where they differ,
    the second is surer.
    """
    labels = np.repeat([0, 1], 30)
    numbers = np.tile(np.arange(30) / 30, 2)

    def outputs(share: float, certainty: np.ndarray) -> np.ndarray:
        of_true = np.where(numbers < share, certainty, 1 - certainty)
        return np.log(
            np.stack([np.where(labels == each, of_true, 1 - of_true) for each in (0, 1)], 1)
        )

    surer = np.where((numbers < alone) != (numbers < together), 0.95, 0.6)
    return [
        answering(
            finished("local", 0.5, setting=setting), labels, outputs(alone, np.full(60, 0.6))
        ),
        answering(finished("fedavg", 0.5, setting=setting), labels, outputs(together, surer)),
    ]


def test_gains_of_a_setting(tmp_path: Path) -> None:
    text = shown("table2", duo(NEU, alone=0.8, together=0.4), tmp_path)
    found = row(text, "Gains of joining, NEU-CLS, disjoint, 2 classes, 10 images a node", "FedAvg")
    # Where the two differ the surer one prevails in the mix; all five nodes lose 40 points, wholly
    # below -3.
    assert found[:4] == ["5", "80.0", "-40.0 (5; 5)", "-40.0 (5; 5)"]
    # Ten images suffice to see it: four of them are right with the one, eight with the other, now
    # and then fewer.
    assert float(found[4].split()[0]) > -10
    assert float(found[5]) < 10
    assert "Newcombe" in text


def test_over_all_settings_nodes_add_up(tmp_path: Path) -> None:
    cells = [
        *duo(NEU, alone=0.8, together=0.4),
        *duo(replace(NEU, dataset="X-SDD"), alone=0.8, together=0.9),
    ]
    text = shown("table2", cells, tmp_path)
    assert (
        row(text, "Gains of joining, X-SDD, disjoint, 2 classes, 10 images a node", "FedAvg")[2]
        == "+10.0 (0; 0)"
    )
    assert row(text, "Gains of joining, all settings", "FedAvg")[:3] == [
        "10",
        "80.0",
        "-15.0 (5; 5)",
    ]


def test_cells_without_outputs_have_no_such_table(tmp_path: Path) -> None:
    assert "Gains" not in shown(
        "table2", [finished("local", 0.5), finished("fedavg", 0.6)], tmp_path
    )


def test_rules_are_compared_on_the_tuning_pool_and_the_comparison_is_of_the_other(
    tmp_path: Path,
) -> None:
    cells = [*duo(TUNING, alone=0.8, together=0.4), *duo(REPORT, alone=0.5, together=0.6)]
    text = shown("joining", cells, tmp_path)
    assert (
        row(text, "Gains of joining, NEU-CLS, disjoint, 3 classes, 6 images a node", "FedAvg")[1]
        == "50.0"
    )
    assert "Gains of joining, all settings" not in text  # there is one
    assert row(text, "Always mixed, by the way of mixing", "") == ["FedAvg, 5 nodes"]
    for name in MIXINGS:
        assert row(text, "Always mixed, by the way of mixing", name) == ["-40.0 (5; 5)"]
    title = "Rules; mixed are logits of equal spread"
    assert row(text, title, "together") == row(text, title, "mixed")
    assert len(row(text, title, "together")) == len(SIZES)
    assert all(row(text, title, rule) for rule in RULES)


def test_before_the_report_pool_is_run_the_rules_are_there_already(tmp_path: Path) -> None:
    text = shown("joining", duo(TUNING, alone=0.8, together=0.4), tmp_path)
    assert "## Gains" not in text
    assert "Newcombe" in text  # what the brackets mean
    assert row(text, "Rules; mixed are logits of equal spread", "together")[0].startswith("-4")
