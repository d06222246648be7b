"""The table of a run, in 80 columns: what each node reached alone and together,
and whether joining was worth it.
"""

import io

import msgspec
from rich.console import Console

from edge.bundle.comparison import Candidate, CandidateName, Comparison
from trainer.federation.run_summary import NodeReport, RunReport, describe_joining, print_table


def node(
    name: str, deployed: CandidateName = "together", gain: float = 0.15, **changed: object
) -> NodeReport:
    alone = Candidate(accuracy=0.6, low=0.5, high=0.7)
    better = Candidate(accuracy=0.6 + gain, low=0.5 + gain, high=0.7 + gain, gain=gain)
    comparison = Comparison(
        images=60, guessing=0.25, alone=alone, together=better, mixed=better, deployed=deployed
    )
    fields = {
        "classes": ["a", "b"],
        "images": 8,
        "test_images": 60,
        "accuracy": comparison.chosen.accuracy,
        "accuracy_low": 0.6,
        "accuracy_high": 0.9,
        "f1": 0.7,
        "accuracy_all": 0.55,
        "comparison": comparison,
    }
    return NodeReport(name=name, **{**fields, **changed})


def printed(*nodes: NodeReport) -> str:
    report = RunReport(
        method="m",
        options={},
        model="small",
        size=32,
        training={},
        rounds=2,
        seed=0,
        nodes=[*nodes],
    )
    said = io.StringIO()
    print_table(report, Console(file=said, width=80))
    return said.getvalue()


def test_it_fits_a_narrow_terminal_with_every_column() -> None:
    said = printed(
        node("plant-1", accuracy_others=0.7, onnx_accuracy=0.75), node("plant-12", classes=["c"])
    )
    assert max(map(len, said.splitlines())) <= 80
    row = next(line for line in said.splitlines() if "plant-1" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "plant-1",
        "2 of 3",
        "8 + 60",
        "60.0",
        "75.0",
        "75.0",
        "55.0",
        "70.0",
    ]


def test_nodes_of_whose_images_no_groups_are_known_are_named() -> None:
    said = printed(node("plant-1"), node("plant-2", is_grouped=False))
    (line,) = [line for line in said.splitlines() if "--group" in line]
    assert "plant-2" in line
    assert "plant-1" not in line
    assert "--group" not in printed(node("plant-1"))


def test_a_column_that_no_node_has_a_value_for_is_left_out() -> None:
    said = printed(node("plant-1", comparison=None))
    assert "all classes" in said
    assert not any(title in said for title in ("alone", "together", "deployed", "others"))


def test_a_sentence_sums_up_what_joining_was_worth() -> None:
    nodes = [
        node("a"),
        node("b", "mixed", 0.05, accuracy_others=0.8),
        node("c", "alone"),
        node("d", gain=-0.1),
    ]
    assert describe_joining(nodes) == (
        "own classes, as a line judges: +2.5 points over training alone, 2 of 4 better, 1 worse "
        "(deployed: together at 2, mixed at 1, alone at 1); 80 % right on classes that a plant "
        "has no image of, if all weigh the same"
    )


def test_nothing_is_said_where_nothing_was_compared() -> None:
    assert describe_joining([node("a", comparison=None)]) == ""


def test_a_nodes_warnings_follow_the_table() -> None:
    whole = node("plant-1").comparison
    assert whole is not None
    said = printed(node("plant-1", comparison=msgspec.structs.replace(whole, fall=(0.9, 0.75))))
    assert "plant-1: accuracy fell" in " ".join(said.split())
