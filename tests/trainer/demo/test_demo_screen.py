"""What the demo has shown fits one screen, and has one figure for one thing."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from edge.bundle.comparison import Candidate, Comparison, TrainingGain
from trainer.demo.demo_screen import print_outcome
from trainer.federation.run_summary import FirstModel, NodeReport, RunReport, Serving

SHOWN = TrainingGain(images=60, first=0.8, trained=0.9, low=0.02, high=0.18, is_shown=True)
NOT_SHOWN = TrainingGain(images=60, first=0.8, trained=0.75, low=-0.12, high=0.04)


def node(
    name: str, training: TrainingGain | None, accuracy: float, **changed: object
) -> NodeReport:
    alone = Candidate(accuracy=0.65, low=0.5, high=0.8)
    deployed = Candidate(accuracy=accuracy, low=0.6, high=0.95)
    comparison = Comparison(
        images=60,
        guessing=0.25,
        alone=alone,
        together=deployed,
        mixed=alone,
        deployed="together",
        training=training,
    )
    made = NodeReport(
        name=name,
        classes=["a", "b"],
        images=8,
        test_images=60,
        accuracy=accuracy,
        accuracy_low=0.6,
        accuracy_high=0.95,
        f1=0.7,
        accuracy_all=0.55,
        accuracy_others=0.45,
        comparison=comparison,
        first=FirstModel(seconds=12.0, accuracy=0.8, low=0.68, high=0.88),
    )
    return msgspec.structs.replace(made, **changed)


def printed(*nodes: NodeReport) -> str:
    report = RunReport(
        method="afedcl_plus",
        options={},
        model="mobilenet_v2",
        size=64,
        training={},
        rounds=6,
        seed=0,
        nodes=[*nodes],
        serving=Serving(
            node="plant-1", images=60, agreeing=60, accuracy=0.9, milliseconds_p50=4.25
        ),
        seconds=61.0,
    )
    said = io.StringIO()
    print_outcome(report, Console(file=said, width=80))
    return said.getvalue()


def row(said: str, name: str) -> list[str]:
    (found,) = [line for line in said.splitlines() if line.startswith(f"│ {name}")]
    return [cell.strip() for cell in found.split("│")[1:-1]]


def test_five_plants_fit_one_screen() -> None:
    nodes = [node(f"plant-{number}", SHOWN, 0.9) for number in range(1, 6)]
    lines = printed(*nodes).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80


def test_a_plants_row_has_what_it_reaches_alone_at_first_and_as_deployed() -> None:
    said = printed(node("plant-1", SHOWN, 0.9), node("plant-2", NOT_SHOWN, 0.8))
    assert [cell.split()[0] for cell in row(said, "plant-1")[2:]] == [
        "65.0",
        "80.0",
        "+10.0",
        "90.0",
    ]
    assert [cell.split()[0] for cell in row(said, "plant-2")[2:]] == [
        "65.0",
        "80.0",
        "-5.0",
        "80.0",
    ]
    assert row(said, "plant-1")[-1].endswith("trained")
    assert row(said, "plant-2")[-1].endswith("first")


def test_sentences_are_made_of_the_figures_in_the_rows() -> None:
    said = " ".join(printed(node("plant-1", SHOWN, 0.9), node("plant-2", NOT_SHOWN, 0.8)).split())
    assert "12 s" in said
    assert re.search(r"80\.0 % .*of 120 images", said)  # of the first models
    assert "+2.5 points" in said  # what training added
    assert "at 1 of 2" in said
    assert re.search(r"65\.0 % alone, 85\.0 % .*\+20\.0 points", said)
    assert re.search(r"54 of 60 .*\(90\.0 %\)", said)  # of the daemon's answers


@pytest.mark.parametrize("missing", ["training", "first", "comparison"])
def test_what_a_run_does_not_have_is_left_out(missing: str) -> None:
    plants = [node("plant-1", None, 0.9)]
    if missing == "first":
        plants = [node("plant-1", SHOWN, 0.9, first=None)]
    if missing == "comparison":
        plants = [node("plant-1", None, 0.9, comparison=None, first=None)]
    said = printed(*plants)
    assert "90.0" in said
    assert ("training" in said) == (missing == "first")
    assert ("first model" in said) == (missing == "training")
    assert ("% alone" in said) == (missing != "comparison")
