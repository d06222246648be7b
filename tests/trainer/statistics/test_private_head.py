"""The head of private sums: as good as noise lets it be,
and never worse than a plant's own images make it.
"""

import numpy as np
import pytest

from trainer.privacy.noise import draw_normal
from trainer.statistics.private_head import express, fit
from trainer.statistics.private_sums import PrivateSums, cut, release
from trainer.statistics.sums import VIEWS, Sums, collect, no_images

CLASSES, WIDTH, DIRECTIONS = 4, 24, 8
AXES = np.eye(WIDTH)[:DIRECTIONS]
CENTRE = np.r_[np.full(4, 0.3), np.zeros(WIDTH - 4)]
MEANS = np.random.default_rng(1).normal(0, 0.12, (CLASSES, DIRECTIONS))


def draw(labels: np.ndarray, seed: int) -> np.ndarray:
    """Features of images [n, VIEWS, d] from the public centre: classes that differ,
    images that vary about them.
    """
    random = np.random.default_rng(seed)
    about = MEANS[labels] + random.normal(0, 0.06, (len(labels), DIRECTIONS))
    return (about[:, None] + random.normal(0, 0.01, (len(labels), VIEWS, DIRECTIONS))) @ AXES


def collected(labels: np.ndarray, seed: int) -> Sums:
    return collect(cut(draw(labels, seed)), labels, CLASSES)


def others(plants: int, images: int, noise: float, seed: int = 0) -> PrivateSums:
    """Totals of plants with so many images of each class."""
    random = np.random.default_rng(seed)

    def normal(name: str, count: int) -> np.ndarray:
        return draw_normal([random.bytes(32)], count)[0]

    labels = np.repeat(np.arange(CLASSES), images)
    left = [
        release(collected(labels, 10 + each), CENTRE, AXES, noise, normal) for each in range(plants)
    ]
    return PrivateSums(*(sum(parts) for parts in zip(*left, strict=True))).values()  # type: ignore[arg-type]


def accuracy(
    theirs: PrivateSums, own: Sums, noise: float, classes: tuple[int, ...] = tuple(range(CLASSES))
) -> float:
    labels = np.repeat(classes, 200)
    head = fit(theirs, own.values(), noise, DIRECTIONS)
    return float((head.logits(draw(labels, 99)[:, 0]).argmax(1) == labels).mean())


NOBODY = no_images(CLASSES, WIDTH)
NONE = PrivateSums(np.zeros(1), np.zeros(CLASSES), np.zeros((CLASSES, WIDTH)), np.zeros(WIDTH))
OWN = collected(np.repeat([0, 1], 12), 5)


def test_without_noise_a_plant_without_images_classifies_as_well_as_all_together() -> None:
    assert accuracy(others(3, 20, 1e-6), NOBODY, 1e-6) > 0.9


def test_more_noise_makes_it_worse_and_more_images_better() -> None:
    figures = [
        np.mean([accuracy(others(3, n, noise, s), NOBODY, noise) for s in range(6)])
        for n, noise in ((100, 1.0), (100, 30.0), (20, 30.0))
    ]
    assert figures[0] > figures[1] + 0.05 > figures[2] + 0.15


def test_noise_that_hides_everything_leaves_a_plant_what_its_own_images_tell() -> None:
    alone = accuracy(NONE, OWN, 1.0, (0, 1))
    assert alone > 0.9
    for seed in range(4):
        drowned = others(3, 5, 300.0, seed)
        head = fit(drowned, OWN.values(), 300.0, DIRECTIONS)
        labels = np.repeat([0, 1], 200)
        logits = head.logits(draw(labels, 99)[:, 0])[:, :2]
        assert float((logits.argmax(1) == labels).mean()) > alone - 0.05


def test_a_class_of_which_there_is_not_more_than_noise_is_not_named() -> None:
    theirs = others(3, 30, 2.0)
    without = theirs._replace(images=theirs.images * np.array([1, 1, 1, 0]))
    head = fit(without, NOBODY.values(), 2.0, DIRECTIONS)
    assert head.means.known.tolist() == [True, True, True, False]
    labels = np.repeat(np.arange(CLASSES), 50)
    assert 3 not in head.logits(draw(labels, 3)[:, 0]).argmax(1)
    assert fit(NONE, NOBODY.values(), 2.0, DIRECTIONS).means.known.sum() == 0


def test_joining_helps_with_classes_that_a_plant_has_not() -> None:
    assert accuracy(others(3, 100, 3.0), OWN, 3.0) > accuracy(NONE, OWN, 3.0) + 0.25


def test_it_is_expressed_for_features_as_they_are() -> None:
    head = fit(others(3, 30, 1.0), OWN.values(), 1.0, DIRECTIONS)
    weight, bias = express(head, CENTRE)
    features = draw(np.arange(CLASSES), 3)[:, 0]
    np.testing.assert_allclose(
        (features + CENTRE) @ weight.T + bias, head.logits(features), atol=1e-9
    )


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0]])
def test_few_images_and_wild_noise_give_finite_heads(counts: list[int]) -> None:
    own = collected(np.repeat(np.arange(CLASSES), counts), 4) if sum(counts) else NOBODY
    for noise in (1e-3, 1.0, 1e4):
        for theirs in (NONE, others(2, 1, noise)):
            head = fit(theirs, own.values(), noise, DIRECTIONS)
            assert np.isfinite(head.weight).all()
            assert np.isfinite(head.bias).all()
