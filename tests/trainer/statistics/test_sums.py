"""Sums of image features: what the formulas say, exact in any order, and no liar's."""

from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from tests.support.drawn_features import Plant, draw_plant, draw_plants, total_of
from trainer.models.named_tensors import Arrays
from trainer.statistics.sums import (
    MAX_IMAGES,
    VIEWS,
    Sums,
    check,
    check_totals,
    choose_images,
    collect,
    directions,
    quantise,
    shapes,
    specs,
)

SKEWED = [[3, 0, 1, 7], [1, 0, 2, 0], [0, 0, 0, 0], [1, 0, 0, 4]]
COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=4)


def reference(plants: list[Plant], classes: int) -> dict[str, np.ndarray]:
    """The sums, image by image and view by view, as the formulas have them."""
    d = plants[0].features.shape[2]
    out = {
        name.removeprefix("statistics."): np.zeros(shape)
        for name, shape in shapes(classes, d).items()
    }
    out["scatter"] = np.zeros((d, d))
    for plant in plants:
        for label in range(classes):
            images = [
                quantise(views)
                for views, own in zip(plant.features, plant.labels, strict=True)
                if own == label
            ]
            n = len(images)
            if n == 0:
                continue
            z = [np.mean(views, 0) for views in images]
            mean = np.mean(z, 0)
            out["images"][label] += n
            out["squares"][label] += n**2
            out["holders"][label] += 1
            out["singles"][label] += n == 1
            out["sums"][label] += np.sum(z, 0)
            out["between"] += n * mean @ mean
            if n == 1:
                out["single_sums"][label] += z[0]
                out["scatter"] += np.outer(z[0], z[0])
            for image, own in zip(images, z, strict=True):
                product = np.mean([np.outer(view - mean, view - mean) for view in image], 0)
                out["scatter"] += product
                out["trace"] += np.square(own - mean).sum()
                out["quartic"] += n / (n - 1) * np.square(product).sum() if n > 1 else 0
    return out


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_are_what_the_formulas_say(seed: int):
    plants = draw_plants(seed, SKEWED, 9)
    expected = reference(plants, 4)
    for name, value in total_of(plants, 4).values()._asdict().items():
        # A step of the grid is at most 2^-24 (fourth powers), and each plant's sum is rounded once.
        assert np.allclose(
            value, expected[name], rtol=0, atol=2e-6 if name == "quartic" else 1e-9
        ), name


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_neither_the_order_of_images_nor_of_plants_nor_threads_change_a_bit(seed: int):
    plants = draw_plants(seed, [[11, 5, 1], [3, 0, 6], [40, 1, 2]], 130)
    order = np.random.default_rng(seed).permutation(len(plants[0].labels))
    shuffled = Plant(plants[0].features[order], plants[0].labels[order])
    with threadpool_limits(1):
        once = total_of(plants, 3)
    with threadpool_limits(2):
        again = total_of([plants[2], shuffled, plants[1]], 3)
    assert all(np.array_equal(*pair) for pair in zip(once, again, strict=True))


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_taken_out_of_totals_might_never_have_been_there(seed: int):
    plants = draw_plants(seed, SKEWED, 5)
    total = total_of(plants, 4)
    replaced = {
        "a plant": plants[1:],
        "an image": [plants[0].without(2), *plants[1:]],
        "a class": [Plant(*(each[plants[0].labels != 3] for each in plants[0])), *plants[1:]],
    }
    for what, left in replaced.items():
        now = total.without(plants[0].sums(4))
        if what != "a plant":
            now = now.combine(left[0].sums(4), np.add)
        assert all(np.array_equal(*pair) for pair in zip(now, total_of(left, 4), strict=True)), what


def test_sums_of_a_hundred_thousand_plants_cannot_overflow():
    """Each plant's steps are bounded by what `check` lets pass: unit vectors,
    MAX_IMAGES of them.
    """
    images, tolerance = MAX_IMAGES, 1.1
    largest = {  # of an entry, for one plant
        "images": images,
        "squares": images**2,
        "holders": 1,
        "singles": 1,
        "sums": images,
        "single_sums": 1,
        "scatter": images,
        "trace": images,
        "between": images,
        "quartic": 32 * images,
    }
    for name, spec in specs(10, 4).items():
        steps = largest[name.removeprefix("statistics.")] * 2**spec.scale
        assert 100_000 * steps * tolerance < 2**63, name


def test_named_arrays_have_the_shapes_and_types_that_are_announced():
    sums = draw_plant(0, [2, 0, 1], 6).sums(3)
    assert {name: (value.shape, value.dtype) for name, value in sums.arrays().items()} == {
        name: (tuple(spec.shape), np.dtype(spec.dtype)) for name, spec in specs(3, 6).items()
    }
    assert all(np.array_equal(*pair) for pair in zip(Sums.of(sums.arrays()), sums, strict=True))


def test_projection_directions_are_orthonormal_and_the_same_for_all():
    first = directions(40, 7)
    assert np.allclose(first @ first.T, np.eye(7))
    assert np.array_equal(first, directions(40, 7))


def test_of_more_images_than_count_rare_classes_keep_all():
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [3, 6000, 2500]))
    chosen = choose_images(labels)
    assert np.bincount(labels[chosen]).tolist() == [3, 2047, 2046]
    assert (np.diff(chosen) > 0).all()
    assert choose_images(labels[:100]).tolist() == list(range(100))


@pytest.mark.parametrize("spoilt", [1.5, np.nan])
def test_features_that_are_no_unit_vectors_are_refused(spoilt: float):
    plant = draw_plant(0, [2, 1], 4)
    plant.features[1, 3] *= spoilt
    with pytest.raises(ValueError, match="longer than one"):
        plant.sums(2)


def test_more_images_than_a_plant_may_have_are_refused():
    with pytest.raises(ValueError, match="more than the"):
        collect(np.zeros((MAX_IMAGES + 1, VIEWS, 1)), np.zeros(MAX_IMAGES + 1, int), 1)


@settings(max_examples=60)
@given(COUNTS, st.integers(1, 12), st.integers(0, 10**6), st.booleans())
def test_honest_sums_always_pass(counts: list[int], dimensions: int, seed: int, projected: bool):
    plant = draw_plant(seed, counts, dimensions + 3 * projected)
    features = (
        plant.features @ directions(dimensions + 3, dimensions).T if projected else plant.features
    )
    check(collect(features.astype(np.float32), plant.labels, len(counts)).arrays())


@settings(max_examples=40)
@given(COUNTS, st.integers(0, 10**6), st.sampled_from([0.0, 2.0**-15, 2.0**-14, 1e-3]))
def test_images_that_are_nearly_the_same_pass_too(counts: list[int], seed: int, difference: float):
    random = np.random.default_rng(seed)
    one = random.dirichlet(np.ones(60)) ** 0.5
    features = one + difference * random.integers(0, 2, (sum(counts), VIEWS, 60))
    features /= np.maximum(np.linalg.norm(features, axis=2, keepdims=True), 1)
    check(collect(features, np.repeat(np.arange(len(counts)), counts), len(counts)).arrays())


def test_a_plant_without_images_passes():
    sums = draw_plant(0, [0, 0], 5).sums(2)
    assert not any(value.any() for value in sums)
    check(sums.arrays())


Change = Callable[[Sums], Sums]


def entry(name: str, index: int | tuple[int, int], value: Callable[[int], int]) -> Change:
    """Another value of one entry of a sum."""

    def change(sums: Sums) -> Sums:
        array = getattr(sums, name).copy()
        array[index] = value(int(array[index]))
        return sums._replace(**{name: array})

    return change


def both(*changes: Change) -> Change:
    """One change after the other."""
    return lambda sums: reduce(lambda made, change: change(made), changes, sums)


def counted(label: int, images: int) -> Change:
    """Another number of images, told alike in all counts."""
    return both(
        entry("images", label, lambda _: images),
        entry("squares", label, lambda _: images**2),
        entry("holders", label, lambda _: int(images > 0)),
        entry("singles", label, lambda _: int(images == 1)),
    )


def wrapping(sums: Sums) -> Sums:
    """Counts whose sum, and squares, are 0 modulo 2^64."""
    images = np.full(4, 2**62)
    return sums._replace(
        images=images, squares=images * 0, holders=images // images, singles=images * 0
    )


def lengthened(label: int) -> Change:
    """A mean of length 1.3, all that follows from it being right."""

    def change(sums: Sums) -> Sums:
        array = sums.sums.copy()
        array[label] = (
            array[label] * 1.3 / np.linalg.norm(array[label] / 2**18 / sums.images[label])
        )
        single = np.where((sums.images == 1)[:, None], array, 0)
        between = (np.square(array.astype(float)).sum(1) / np.maximum(sums.images, 1)).sum() / 8
        return sums._replace(sums=array, single_sums=single, between=np.array([round(between)]))

    return change


def pointing_elsewhere(sums: Sums) -> Sums:
    """The single image's mean is not in the scatter, which has no negative direction itself."""
    array = np.zeros_like(sums.sums)
    array[2, 0] = 2**18
    scatter = np.diag([0, *[2**33] * (array.shape[1] - 1)])[np.triu_indices(array.shape[1])]
    of_others = sums._replace(
        sums=array, single_sums=array, scatter=scatter, between=np.array([2**33])
    )
    return of_others._replace(trace=np.array([0]))


TOP = 2**63 - 1
LIARS: dict[str, tuple[str, Change]] = {
    "a negative number of images": ("images; 0 to", counted(1, -1)),
    "too many images": ("images; 0 to", counted(0, MAX_IMAGES + 1)),
    "too many images in sum": ("images; 0 to", counted(0, MAX_IMAGES)),
    "as many as wrap around": ("images; 0 to", wrapping),
    "squares of other counts": (
        "contradict their own numbers",
        entry("squares", 0, lambda old: old + 1),
    ),
    "a holder without images": ("contradict their own numbers", entry("holders", 1, lambda _: 1)),
    "a single class of three": ("contradict their own numbers", entry("singles", 0, lambda _: 1)),
    "a longer mean": ("longer than any", lengthened(0)),
    "a longer single image": ("longer than any", lengthened(2)),
    "extreme features": ("longer than any", entry("sums", (0, 0), lambda _: -TOP - 1)),
    "a class's sum without images": ("longer than any", entry("sums", (1, 0), lambda _: 1)),
    "another single image": ("single images", entry("single_sums", (2, 0), lambda old: old + 1)),
    "a single image of another class": (
        "single images",
        entry("single_sums", (0, 0), lambda old: old + 1),
    ),
    "another length of means": ("their own means", entry("between", 0, lambda old: old + 1)),
    "extreme length of means": ("their own means", entry("between", 0, lambda _: -TOP - 1)),
    "a negative trace": ("spread more widely", entry("trace", 0, lambda _: -1)),
    "an extreme trace": ("spread more widely", entry("trace", 0, lambda _: TOP)),
    "too much scatter": ("spread more widely", entry("scatter", 0, lambda old: old + 12 * 2**33)),
    "extreme scatter": ("spread more widely", entry("scatter", 0, lambda _: TOP)),
    "a negative fourth moment": ("fourth moment", entry("quartic", 0, lambda _: -1)),
    "an extreme fourth moment": ("fourth moment", entry("quartic", 0, lambda _: TOP)),
    "a negative variance": (
        "negative direction",
        both(entry("scatter", 6, lambda _: -(2**20)), entry("trace", 0, lambda _: 0)),
    ),
    "correlation above one": ("negative direction", entry("scatter", 1, lambda old: old + 2**36)),
    "extreme covariance": ("negative direction", entry("scatter", 1, lambda _: -TOP - 1)),
    "a single image outside the scatter": ("negative direction", pointing_elsewhere),
}


@pytest.mark.parametrize("name", LIARS)
@pytest.mark.parametrize("seed", [0, 1])
def test_liars_are_refused(name: str, seed: int):
    message, change = LIARS[name]
    honest = draw_plant(seed, [3, 0, 1, 7], 6).sums(4)
    check(honest.arrays())
    liar: Arrays = change(honest).arrays()
    with np.errstate(over="raise"), pytest.raises(ValueError, match=message):
        check(liar)


@settings(max_examples=30)
@given(st.lists(COUNTS, min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 10**6))
def test_honest_totals_always_pass(counts: list[list[int]], dimensions: int, seed: int) -> None:
    padded = [row + [0] * (4 - len(row)) for row in counts]
    plants = draw_plants(seed, padded, dimensions)
    total = total_of(plants, 4)
    check_totals(total, len(plants))
    check_totals(total.without(plants[0].sums(4)), len(plants))


def every(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Other values of all entries of a sum."""
    return lambda sums: sums._replace(**{name: value(getattr(sums, name))})


FALSE_TOTALS: dict[str, tuple[str, Change]] = {
    "no images": ("images; 0 to", every("images", np.zeros_like)),
    "negative images": ("images; 0 to", every("images", np.negative)),
    "most images": ("images; 0 to", every("images", lambda old: old * 0 + TOP)),
    "least images": ("images; 0 to", every("images", lambda old: old * 0 - TOP - 1)),
    "images that wrap around": ("images; 0 to", every("images", lambda old: old * 0 + 2**62)),
    "more images than their holders can have": (
        "their own numbers",
        entry("images", 0, lambda _: 10**4),
    ),
    "more holders than nodes": ("their own numbers", every("holders", lambda old: old + 4)),
    "negative holders": ("their own numbers", every("holders", lambda old: -old - 10)),
    "more singles than holders": ("their own numbers", every("singles", lambda old: old + 2)),
    "negative singles": ("their own numbers", every("singles", lambda old: old - 5)),
    "negative squares": ("their own numbers", every("squares", lambda old: old * 0 - 2**62)),
    "squares below counts": ("their own numbers", every("squares", np.zeros_like)),
    "squares above those of one plant": (
        "their own numbers",
        every("squares", lambda old: old * 9),
    ),
    "extreme sums": ("longer than any", every("sums", lambda old: old * 0 + TOP)),
    "extreme sums of single images": (
        "longer than any",
        every("single_sums", lambda old: old * 0 - TOP - 1),
    ),
    "least lengths of means": ("their own means", every("between", lambda old: old * 0 - TOP - 1)),
    "means shorter than their mean": ("their own means", every("between", np.zeros_like)),
    "most lengths of means": ("their own means", every("between", lambda old: old * 0 + TOP)),
    "a negative trace": ("spread more widely", every("trace", np.negative)),
    "an extreme trace": ("spread more widely", every("trace", lambda old: old * 0 + TOP)),
    "no scatter": ("spread more widely", every("scatter", np.zeros_like)),
    "least scatter": ("spread more widely", every("scatter", lambda old: old * 0 - TOP - 1)),
    "extreme covariances": ("negative direction", entry("scatter", 1, lambda _: TOP)),
    "an extreme fourth moment": ("fourth moment", every("quartic", lambda old: old * 0 + TOP)),
    "a negative fourth moment": ("fourth moment", every("quartic", np.negative)),
}


@pytest.mark.parametrize("name", FALSE_TOTALS)
def test_false_totals_are_refused(name: str) -> None:
    message, change = FALSE_TOTALS[name]
    plants = draw_plants(0, SKEWED, 6)
    own, total = plants[0].sums(4), total_of(plants, 4)
    with pytest.raises(ValueError, match=message):
        check_totals(change(total).without(own), len(plants))


def test_totals_without_a_plant_that_they_should_hold_are_refused() -> None:
    plants = draw_plants(0, SKEWED, 6)
    own = plants[0].sums(4)
    with pytest.raises(ValueError, match="images; 0 to"):
        check_totals(total_of(plants[1:], 4).without(own), len(plants))


def test_a_trace_needs_two_images_of_a_class():
    """Else the spread of images at a plant would grow without any degree of freedom."""
    honest = draw_plant(0, [1, 1, 0], 6).sums(3)
    with pytest.raises(ValueError, match="spread"):
        check(honest._replace(trace=np.array([2**20])).arrays())


def test_images_scatter_no_more_than_their_views_do():
    plant = draw_plant(0, [3, 1, 5], 6)
    # far from the widest that unit vectors can be spread
    honest = collect(plant.features / 2, plant.labels, 3)
    check(honest.arrays())
    with pytest.raises(ValueError, match="spread"):
        check(honest._replace(trace=honest.trace * 3 // 2).arrays())
