"""Private sums: no image moves them farther than the noise is made for,
and nothing else of them is exact.
"""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.privacy.noise import derive_key, draw_normal
from trainer.statistics.private_sums import (
    RADIUS,
    SENSITIVITY,
    PrivateSums,
    check,
    check_totals,
    cut,
    release,
    specs,
)
from trainer.statistics.sums import MAX_IMAGES, VIEWS, Sums, collect

CLASSES, WIDTH, NOISE = 3, 12, 5.0
DIRECTIONS = np.eye(WIDTH)
CENTRE = np.full(WIDTH, 0.25)


def normal(name: str, count: int) -> np.ndarray:
    return draw_normal([derive_key(b"0123456789abcdef", name.encode())], count)[0]


def silent(name: str, count: int) -> np.ndarray:
    return np.zeros(count)


def exact(seed: int = 0, counts: tuple[int, ...] = (4, 3, 2), length: float = 1.0) -> Sums:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), counts)
    features = random.normal(0, length, (len(labels), VIEWS, WIDTH))
    return collect(cut(features), labels, CLASSES)


def leaving(sums: Sums, noise: float = NOISE) -> PrivateSums:
    return release(sums, CENTRE, DIRECTIONS, noise, normal)


def test_features_are_cut_to_the_radius_and_shorter_ones_stay() -> None:
    features = np.random.default_rng(0).normal(0, 1, (50, WIDTH))
    lengths = np.linalg.norm(cut(features), axis=1)
    assert lengths.max() <= RADIUS
    assert lengths.min() > RADIUS * 0.999
    assert np.allclose(
        cut(features) / lengths[:, None], features / np.linalg.norm(features, axis=1, keepdims=True)
    )
    assert np.array_equal(cut(features * 1e-3), features * 1e-3)


vectors = st.lists(st.floats(-3, 3), min_size=WIDTH, max_size=WIDTH)


@settings(max_examples=200, deadline=None)
@given(vectors, vectors, st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1))
def test_replacing_an_image_moves_what_leaves_by_the_sensitivity_at_most(
    one: list[float], other: list[float], label: int, another: int
) -> None:
    """Sums in lengths of RADIUS, and numbers of images, as one vector:
    their noise has the same deviation.
    """
    rest = np.random.default_rng(0).normal(0, 1, (4, VIEWS, WIDTH))
    moved = []
    for vector, of in ((one, label), (other, another)):
        features = np.concatenate([rest, np.broadcast_to(vector, (1, VIEWS, WIDTH))])
        sums = collect(cut(features), np.array([0, 1, 2, 1, of]), CLASSES)
        left = release(sums, CENTRE, DIRECTIONS, NOISE, silent).values()
        moved.append(np.concatenate([left.sums.ravel() / RADIUS, left.images]))
    assert np.linalg.norm(moved[0] - moved[1]) <= SENSITIVITY


def test_the_sensitivity_is_reached() -> None:
    apart = np.zeros((2, VIEWS, WIDTH))
    apart[0, :, 0], apart[1, :, 0] = 1, -1
    one, other = (
        release(
            collect(cut(each[None]), np.array([0]), CLASSES), CENTRE, DIRECTIONS, NOISE, silent
        ).values()
        for each in apart
    )
    assert np.linalg.norm(one.sums - other.sums) == pytest.approx(SENSITIVITY * RADIUS, rel=1e-3)


def test_noise_has_the_deviation_that_the_account_is_told() -> None:
    drawn = np.random.default_rng(0)

    def fresh(name: str, count: int) -> np.ndarray:
        return draw_normal([drawn.bytes(32)], count)[0]

    sums = exact()
    left = [release(sums, CENTRE, DIRECTIONS, NOISE, fresh).values() for _ in range(800)]
    images = np.array([each.images for each in left]) - sums.images
    vectors = np.array([each.sums for each in left]) - sums.values().sums
    assert images.std() == pytest.approx(NOISE, rel=0.03)
    assert vectors.std() == pytest.approx(NOISE * RADIUS, rel=0.01)
    assert abs(images.mean()) < 0.4
    assert abs(vectors.mean()) < 0.05
    joined = np.concatenate([images, vectors.reshape(len(vectors), -1)], 1)
    assert np.abs(np.corrcoef(joined.T) - np.eye(joined.shape[1])).max() < 0.16, (
        "one tells nothing of another"
    )


def test_noise_beside_the_public_directions_is_taken_off_again() -> None:
    few = np.linalg.qr(np.random.default_rng(1).normal(0, 1, (WIDTH, 3)))[0].T
    features = np.random.default_rng(0).normal(0, 1, (5, VIEWS, WIDTH)) @ few.T @ few
    sums = collect(cut(features), np.array([0, 1, 2, 1, 0]), CLASSES)
    left = release(sums, CENTRE, few, NOISE, normal).values().sums
    assert np.abs(left - left @ few.T @ few).max() < 1e-5
    assert np.abs(left - sums.values().sums).std() > NOISE * RADIUS / 10


def test_sums_and_noise_are_added_as_whole_numbers_of_steps() -> None:
    """So what noise does to the last digits tells nothing of what it was added to."""
    one, other = exact(0), exact(1)
    differences = leaving(one).sums - one.sums, leaving(other).sums - other.sums
    assert np.array_equal(*differences)
    assert np.array_equal(
        leaving(one).images - (one.images << 18), leaving(other).images - (other.images << 18)
    )


def test_nothing_else_leaves_but_what_everybody_knows() -> None:
    assert sorted(leaving(exact()).arrays()) == sorted(specs(CLASSES, WIDTH))
    left = leaving(exact()).values()
    assert left.plants.tolist() == [1]
    assert np.allclose(left.centre, CENTRE, atol=1e-5)


def test_totals_are_the_plants_sums_in_any_order() -> None:
    plants = [leaving(exact(seed)) for seed in range(4)]
    totals = reduce(lambda one, other: PrivateSums(*map(np.add, one, other)), plants)
    values = totals.values()
    assert values.plants.tolist() == [4]
    assert np.allclose(values.centre, CENTRE, atol=1e-5)
    check_totals(totals, 4, NOISE)
    again = reduce(lambda one, other: PrivateSums(*map(np.add, one, other)), reversed(plants))
    assert all(np.array_equal(*pair) for pair in zip(totals, again, strict=True))


def altered(**changes: np.ndarray) -> PrivateSums:
    return leaving(exact())._replace(**changes)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (altered(plants=np.array([2])), "those of 2 plants, not of one"),
        (altered(plants=np.array([0])), "those of 0 plants, not of one"),
        (
            altered(images=np.full(CLASSES, (MAX_IMAGES + 100) << 18)),
            "images are possible|images; 4096 and noise",
        ),
        (altered(images=np.full(CLASSES, np.iinfo(np.int64).min)), "4096 and noise are possible"),
        (altered(sums=np.full((CLASSES, WIDTH), 10_000 << 18)), "a sum longer"),
        (altered(centre=np.full(WIDTH, 2 << 18)), "a centre longer"),
    ],
)
def test_sums_that_no_images_and_noise_can_have_are_refused(given: PrivateSums, why: str) -> None:
    check(leaving(exact()), NOISE)
    with pytest.raises(ValueError, match=why):
        check(given, NOISE)


def test_totals_of_more_plants_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 plants.*0 to 4"):
        check_totals(altered(plants=np.array([5])), 4, NOISE)
