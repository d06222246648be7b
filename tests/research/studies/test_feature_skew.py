"""Feature skew: cameras that differ by plant, and heads that are compared in one federation."""

import numpy as np

from research.studies.feature_skew import HEADS, Outcome, Plant, draw_camera, measure, rows
from tests.support.drawn_features import draw_plant


def test_a_camera_is_its_plants_own_and_the_same_whenever_it_is_drawn():
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    taken = [
        draw_camera(seed, node).shoot(image)
        for seed, node in ((0, "a"), (0, "a"), (0, "b"), (1, "a"))
    ]
    assert np.array_equal(taken[0], taken[1])
    assert all(np.abs(taken[0].astype(int) - other).mean() > 2 for other in taken[2:])
    assert taken[0].dtype == np.uint8


def plant(number: int, counts: list[int]) -> Plant:
    """With images that it will see of all three classes."""
    train, seen = (draw_plant(0, each, 40, number=number) for each in (counts, [10, 10, 10]))
    return Plant(train.features, train.labels, seen.features[:, 0], seen.labels)


def test_only_what_others_tell_names_their_classes():
    found = measure([plant(0, [4, 4, 0]), plant(1, [0, 4, 4])], 3, HEADS)
    assert found.keys() == {"alone", *HEADS}
    assert found["alone"][1] <= 2 / 3 < min(found[head][1] for head in HEADS)
    assert min(own for own, _ in found.values()) > 0.8


def test_differences_are_paired_by_seed():
    outcomes = [
        Outcome("NEU, no skew", head, "report", seed, base + seed / 10, base)
        for head, base in (("pooled", 0.5), ("weighed", 0.6))
        for seed in range(3)
    ]
    assert list(rows(outcomes)) == [
        ["NEU, no skew", "pooled", "60.0", "", "50.0", ""],
        ["NEU, no skew", "weighed", "70.0", "+10.0 ± 0.0", "60.0", "+10.0 ± 0.0"],
    ]
