"""Measures of attacks, checked by hand."""

import numpy as np
import pytest
import torch

from edge_node.extensions.audit import measures
from edge_node.extensions.audit.exposure import Exposure
from trainer.seeding import generator


def test_the_areas_are_those_counted_by_hand() -> None:
    positive = np.array([True, True, False, False])
    for values, area in (
        ([3, 4, 1, 2], 1.0),
        ([1, 2, 3, 4], 0.0),
        ([1, 1, 1, 1], 0.5),
        ([2, 4, 1, 3], 0.75),
    ):
        assert measures.auc(np.array(values, np.float32), positive) == area


def test_similarity_is_one_for_equal_images_and_as_the_formula_has_it_for_flat_ones() -> None:
    image = generator(0).random((2, 3, 16, 16)).astype(np.float32)
    assert measures.ssim(image, image) == pytest.approx(1)
    dark, bright = np.full((1, 3, 8, 8), 0.2, np.float32), np.full((1, 3, 8, 8), 0.6, np.float32)
    assert measures.ssim(dark, bright) == pytest.approx(
        (2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4), rel=1e-4
    )


def test_the_interval_of_an_area_is_hanley_and_mcneils_and_narrows_with_images() -> None:
    # Their example: area 0.893, 58 normal and 51 abnormal images, standard error 0.032.
    low, high = measures.auc_interval(0.893, 51, 58)
    assert (high - low) / 2 / 1.96 == pytest.approx(0.032, abs=0.001)
    assert measures.auc_interval(1.0, 5, 5) == (1.0, 1.0)
    few, many = (measures.auc_interval(0.7, count, count) for count in (10, 1000))
    assert few[0] < many[0] < 0.7 < many[1] < few[1]


def test_shares_of_classes_agree_by_what_they_have_in_common() -> None:
    assert measures.overlap(np.array([0.5, 0.5, 0]), np.array([0.5, 0.5, 0])) == 1
    assert measures.overlap(np.array([0.5, 0.5, 0]), np.array([0, 0.5, 0.5])) == 0.5
    assert measures.overlap(np.array([1.0, 0]), np.array([0, 1.0])) == 0


@pytest.mark.parametrize(
    ("value", "chance", "told"),
    [
        (1, 0.5, 1),
        (0.5, 0.5, 0),
        (0.75, 0.5, 0.5),
        (0.2, 0.5, 0),
        (1, 1, 1),
        (0.9, 1, 0),
        (0.9, 0.8, 0.5),
    ],
)
def test_what_is_told_begins_at_chance(value: float, chance: float, told: float) -> None:
    found = Exposure(what="membership", seen="sums", attack="any", value=value, chance=chance)
    assert found.told == pytest.approx(told)


def test_the_nearest_image_is_found_whichever_way_up_it_is() -> None:
    images = torch.from_numpy(generator(1).random((4, 3, measures.SIDE, measures.SIDE)))
    for turned in (images[2], torch.rot90(images[2], 3, (1, 2)), images[2].flip(1)):
        alike, place = measures.nearest(turned, images)
        assert place == 2
        assert alike == pytest.approx(1)
    assert measures.nearest(1 - images[2], images)[0] < 0.3
