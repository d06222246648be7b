"""Skew and newcomers: whose images and figures are compared with whose."""

from pathlib import Path

import numpy as np
import torch

from research.studies.skew_and_newcomers import Judge, Outcome, Plants, drop_class, held_out, rows
from trainer.data.class_folders import Images, LabelledImages
from trainer.models.network import Network


def labelled(labels: list[int]) -> LabelledImages:
    names = [f"{position}.png" for position in range(len(labels))]
    pixels = np.zeros((len(labels), 2, 2, 3), np.uint8)
    return LabelledImages(pixels, np.array(labels), tuple(names), tuple(map(Path, names)))


def test_members_lack_an_arriving_class_and_the_newcomer_has_it():
    member, newcomer = (
        Images(labelled(train), labelled(test))
        for train, test in (([0, 1, 1], [0, 1]), ([1], [1, 1]))
    )
    plants = Plants(["a", "b"], {"plant-1": member}, newcomer, arriving=1).without_arriving()
    assert plants.newcomer is newcomer
    kept = plants.members["plant-1"]
    assert [part.labels.tolist() for part in (kept.train, kept.test)] == [[0], [0]]
    assert drop_class(member, 0).train.digests == ("1.png", "2.png")


class Scores(Judge):
    """Whose models are tables of logits: a row for each label that an image has."""

    def predict(self, model, images):
        return model["logits"][torch.from_numpy(images.labels)].numpy()


def test_own_classes_alone_are_candidates_for_own_images_and_all_classes_for_everyones():
    judge, model = (
        Scores(Network("small", 3)),
        {"logits": torch.tensor([[1.0, 0, 2], [0, 1, 0], [0, 0, 1]])},
    )
    first, second = (
        Images(labelled([0, 1]), labelled([0, 1])),
        Images(labelled([1, 2]), labelled([1, 2])),
    )
    assert judge.own(model, first).tolist() == [True, True]
    assert judge.all(model, [first, second]) == 3 / 4
    assert len(held_out(first).labels) == 2


def test_differences_are_paired_by_data_set_and_seed():
    outcomes = [
        Outcome(data, "none", method, "report", seed, {"own": base + seed / 10, **extra})
        for data in ("NEU", "X-SDD")
        for seed in range(2)
        for method, base, extra in (
            ("local", 0.5, {}),
            ("fedavg", 0.6, {}),
            ("afedcl_plus", 0.8, {"no image own": 0.7}),
        )
    ]
    assert list(rows(outcomes)) == [
        ["none", "own", "55.0", "65.0", "85.0", "+20.0 ± 0.0", "+30.0 ± 0.0", "4"],
        ["none", "no image own", "", "", "70.0", "", "", "4"],
    ]
