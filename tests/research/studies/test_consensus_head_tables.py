"""Forecasts from left-out images, and encoders that these choose, by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from research.studies.consensus_head import LeftOut, Plant, Result, Trial
from research.studies.consensus_head_tables import CORRECTIONS, encoders


def plant(
    answers: Sequence[int], labels: Sequence[int], others: int = 1, own: float = 0.5
) -> Plant:
    """A plant of three classes whose left-out images get these answers;
    others have so many images of each class.
    """
    return Plant(
        trained={},
        tested=60,
        heads={"gaussian": (own, own, own)},
        left_out=LeftOut(
            logits=np.eye(3, dtype=np.float32)[list(answers)].tobytes(),
            labels=list(labels),
            rest=[list(labels).count(label) - 1 for label in labels],
            elsewhere=[others] * len(labels),
        ),
    )


# Four images, of which two are wrong, and six that are right.
ONE, ALL_RIGHT = plant([0, 1, 1, 2], [0, 0, 1, 1]), plant([0] * 6, [0] * 6)


@pytest.mark.parametrize(
    ("name", "own", "among_all"),
    [
        ("plain", 0.5, 0.5),
        ("two thirds of errors", 2 / 3, 2 / 3),
        # of three images of each class
        ("fewer errors", 1 - (2 / 3 + 2 / 3) / 4, 1 - (2 / 3 + 2 / 3) / 4),
        ("half an image", 1 - 2 / 4.5, 1 - 2 / 4.5),
        # 8 of the ten images are right
        ("shrunk, 10 images", (4 * 0.5 + 10 * 0.8) / 14, (4 * 0.5 + 10 * 0.8) / 14),
    ],
)
def test_corrections_of_a_forecast(name: str, own: float, among_all: float) -> None:
    found = CORRECTIONS[name]([ONE, ALL_RIGHT])[0]
    assert (found.own, found.all, found.images) == (pytest.approx(own), pytest.approx(among_all), 4)


def test_own_classes_are_the_only_candidates_of_own_accuracy() -> None:
    only = plant([2, 0], [0, 0])
    found = CORRECTIONS["plain"]([only])[0]
    assert (found.own, found.all) == (1, 0.5)


def test_the_encoder_with_the_least_loss_is_chosen_and_judged_by_what_it_reaches() -> None:
    def result(encoder: str, seed: int, wrong: Sequence[int], own: float) -> Result:
        trial = Trial(
            dataset="neu",
            pool="report",
            partition="disjoint",
            classes=2,
            samples=4,
            seed=seed,
            encoder=encoder,
        )
        return Result(trial=trial, plants=[plant(wrong, [0, 0, 1, 1], own=own)])

    good, bad = [0, 0, 1, 1], [1, 1, 0, 0]
    results = [
        result("a", 0, good, 0.9),
        result("b", 0, bad, 0.8),  # the choice is right
        result("a", 1, good, 0.7),
        result("b", 1, bad, 0.8),  # and here ten points are lost
    ]
    rows = {row[0]: row[1] for row in encoders(results, "both").rows}
    assert rows["cross-entropy"] == "1 of 2, 5.0"
    assert rows["always b"] == "1 of 2, 5.0"
