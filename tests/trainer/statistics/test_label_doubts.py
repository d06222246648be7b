"""Images whose label is wrong, found by the head without them."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.drawn_features import draw_plant
from trainer.statistics.label_doubts import (
    Doubt,
    describe_doubts,
    find_doubts,
    find_judged,
    log_softmax,
)
from trainer.statistics.lda_head import leave_one_out
from trainer.statistics.sums import collect

CLASSES = ("dent", "scratch", "stain")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_labels_are_ranked_first_with_what_the_images_look_like(seed: int) -> None:
    plant = draw_plant(seed, [20, 20, 20], 16)
    flipped = [3, 25, 47]
    labels = plant.labels.copy()
    labels[flipped] = (labels[flipped] + 1) % 3
    sums = collect(plant.features, labels, 3)
    logits, cosines = leave_one_out(sums, sums, plant.features, labels)
    paths = [Path(f"{number}.png") for number in range(60)]
    doubts = find_doubts(logits, cosines, labels, paths, CLASSES)
    assert {doubt.path for doubt in doubts[:3]} == {f"{number}.png" for number in flipped}
    for doubt in doubts[:3]:
        truth = CLASSES[plant.labels[int(doubt.path.removesuffix(".png"))]]
        assert doubt.looks_like == truth != doubt.label


def test_the_most_doubtful_image_comes_first() -> None:
    """Three of 403 images fit another class, the second of them best; the others fit their own."""
    logits = np.array([[0.0, 30.0], [0.0, 40.0], [0.0, 35.0], *[[50.0, 0.0]] * 400])
    paths = [Path(f"{number}.png") for number in range(403)]
    doubts = find_doubts(
        logits, np.ones((403, 2)), np.zeros(403, np.int64), paths, ("dent", "scratch")
    )
    assert [doubt.path for doubt in doubts] == ["1.png", "2.png", "0.png"]


def test_where_nothing_can_be_judged_nothing_is_doubted() -> None:
    assert find_doubts(np.empty((0, 3)), np.empty((0, 3)), np.empty(0, np.int64), [], CLASSES) == []


def test_an_image_is_judged_if_its_class_has_others_than_its_look_alikes() -> None:
    plant = draw_plant(0, [2, 1, 2], 8)
    sums = plant.sums(3)
    assert find_judged(sums, plant.labels, [[0], [1], [2], [3, 4]]).tolist() == [0, 1]


def test_of_many_ten_are_shown_and_the_others_counted() -> None:
    doubts = [
        Doubt(path=f"{number}.png", label="dent", looks_like="stain" if number else "")
        for number in range(12)
    ]
    lines = list(describe_doubts(doubts, "preview.json"))
    assert lines[:2] == [
        "0.png: labelled dent, is unlike all classes",
        "1.png: labelled dent, looks like stain",
    ]
    assert lines[10:] == ["and 2 more images that do not look like their class: see preview.json"]
    assert len(list(describe_doubts(doubts[:10], "preview.json"))) == 10


def test_probabilities_of_huge_logits_add_up_to_one() -> None:
    assert np.exp(log_softmax(np.array([[1e4, 1e4 - 1, -1e4]]))).sum() == pytest.approx(1)
