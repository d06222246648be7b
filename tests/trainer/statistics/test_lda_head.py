"""The head made of sums: what the formulas say, finite whatever plants have,
and honest about images left out.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawn_features import Plant, draw_plant, draw_plants, total_of
from trainer.statistics.lda_head import (
    Head,
    Means,
    Spread,
    class_axes,
    estimate_means,
    estimate_spread,
    estimate_whitening,
    fit,
    fit_scale,
    leave_one_out,
    linear,
)
from trainer.statistics.sums import VIEWS, Sums, collect, directions, quantise

# nobody has class 1; class 0 is single twice
SKEWED = [[3, 0, 1, 7], [1, 0, 2, 3], [0, 0, 0, 0], [1, 0, 5, 4]]


def head_of(plants: list[Plant], number: int, classes: int) -> Head:
    return fit(total_of(plants, classes), plants[number].sums(classes))


def pooled_spread(plants: list[Plant], classes: int) -> Spread:
    """As METHODS has it, from all features in one place. Needs a class of two images somewhere."""
    d = plants[0].features.shape[2]
    scatter, trace, quartic, between, squares = np.zeros((d, d)), 0.0, 0.0, 0.0, np.zeros(classes)
    own_freedom, pairs = 0, 0
    everything: dict[int, list[np.ndarray]] = {label: [] for label in range(classes)}
    alone: dict[int, list[np.ndarray]] = {label: [] for label in range(classes)}
    for plant in plants:
        for label in range(classes):
            views = quantise(plant.features[plant.labels == label])
            n = len(views)
            if n == 0:
                continue
            everything[label] += list(views.mean(1))
            pairs, own_freedom, squares[label] = (
                pairs + 1,
                own_freedom + n - 1,
                squares[label] + n**2,
            )
            mean = views.mean((0, 1))
            between += n * mean @ mean
            for image in views:
                if n == 1:
                    alone[label].append(image)
                    continue
                product = np.mean([np.outer(view - mean, view - mean) for view in image], 0)
                scatter += product
                quartic += n / (n - 1) * np.square(product).sum()
                trace += np.square(image.mean(0) - mean).sum()
    freedom = float(own_freedom)
    for images in alone.values():
        for image in images:
            centre = np.mean([each.mean(0) for each in images], 0)
            scatter += np.mean([np.outer(view - centre, view - centre) for view in image], 0)
        freedom += max(len(images) - 1, 0)
    sample, within = scatter / freedom, trace / own_freedom
    phi, power = np.square(sample).sum(), np.trace(sample)
    shrinkage = np.clip(((quartic / own_freedom - phi) / freedom) / (phi - power**2 / d), 0.01, 1)
    covariance = (1 - shrinkage) * sample + shrinkage * power / d * np.eye(d)
    seen = [np.array(images) for images in everything.values() if images]
    counts = np.array([len(images) for images in seen])
    explained = sum(len(images) * np.square(images.mean(0)).sum() for images in seen)
    room = counts.sum() - (squares[squares > 0] / counts).sum()
    tau2 = max(0.0, (between - explained - (pairs - len(seen)) * within) / room) if room else 0.0
    return Spread(np.linalg.inv(covariance), within, tau2, freedom, shrinkage)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dimensions", [6, 40])
def test_the_spread_is_that_of_all_features_in_one_place(seed: int, dimensions: int):
    plants = draw_plants(seed, SKEWED, dimensions)
    found, expected = estimate_spread(total_of(plants, 4).values()), pooled_spread(plants, 4)
    assert np.allclose(found.precision, expected.precision, rtol=1e-4)
    assert found[1:] == pytest.approx(expected[1:], rel=1e-4)


def hand_made(images: list[int], squares: list[int], means: list[list[float]]) -> Sums:
    """Counts and sums alone, as float64: what a plant's means are made of."""
    counts = np.array(images, float)
    empty = total_of([draw_plant(0, [0] * len(images), len(means[0]))], len(images)).values()
    return empty._replace(
        images=counts, squares=np.array(squares, float), sums=counts[:, None] * np.array(means)
    )


def test_means_weigh_own_and_others_by_their_precision():
    """By hand: one dimension, s2 = 0.3, tau2 = 0.1.

    Three classes: of both, of others alone, of this plant alone.
    """
    others = hand_made([4, 2, 0], [10, 4, 0], [[0.5], [0.2], [0.0]])
    own = hand_made([2, 0, 3], [4, 0, 9], [[0.9], [0.0], [0.7]])
    found = estimate_means(others, own, Spread(np.eye(1), 0.3, 0.1, 9, 0.3))
    # 0.4 of tau2 is common to all classes of the plant; one class, on both sides, tells of it.
    variance = 0.06 * (1 + 10 / 4**2) + 0.3 / 4
    offset = 0.4 * 0.04 / (0.04 + variance + 0.15)
    weight = variance / (variance + 0.15)
    assert found.offset == pytest.approx(offset)
    assert found.means[:, 0] == pytest.approx(
        [weight * 0.9 + (1 - weight) * (0.5 + offset), 0.2 + offset, 0.7]
    )
    assert found.known.all()


def test_without_spread_between_plants_means_are_those_of_all_images_together():
    others, own = (
        hand_made([4, 2], [16, 4], [[0.5, 0], [0.2, 0.1]]),
        hand_made([2, 6], [4, 36], [[0.8, 0], [0.4, 0.3]]),
    )
    found = estimate_means(others, own, Spread(np.eye(2), 0.3, 0.0, 9, 0.3))
    assert np.allclose(found.means, [[0.6, 0], [0.35, 0.25]])
    assert not found.offset.any()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_are_differences_of_squared_mahalanobis_distances(seed: int):
    head = head_of(draw_plants(seed, SKEWED, 8), 0, 4)
    z = draw_plant(seed, [1, 1, 1, 1], 8, number=9).features[:, 0]
    squared = np.array(
        [
            [(x - h) @ head.spread.precision @ (x - h) for h in head.means.means[head.means.known]]
            for x in z
        ]
    )
    logits = head.logits(z)[:, head.means.known]
    assert np.allclose(logits - logits[:, :1], -(squared - squared[:, :1]) / 2)


def test_logits_of_features_far_from_the_origin_are_exact_in_float32():
    """All features of an encoder point much the same way,
    and a precision of thousands multiplies it.
    """
    means, far = np.array([[0.9, 0.4], [0.9, 0.41], [0.91, 0.4]]), np.array([0.902, 0.403])
    own = hand_made([2, 2, 2], [4, 4, 4], means.tolist())
    spread = Spread(np.diag([4e3, 5e3]), 0.1, 0.0, 9, 0.3)
    weight, bias = linear(
        estimate_means(hand_made([0, 0, 0], [0, 0, 0], means.tolist()), own, spread), spread
    )
    assert np.abs(weight).max() < 60
    found = far.astype(np.float32) @ weight.astype(np.float32).T + bias.astype(np.float32)
    exact = [-(far - mean) @ spread.precision @ (far - mean) / 2 for mean in means]
    assert np.allclose(found - found[0], np.subtract(exact, exact[0]), atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_class_that_nobody_has_is_never_named(seed: int):
    plants = draw_plants(seed, SKEWED, 8)
    head = head_of(plants, 1, 4)
    assert head.means.known.tolist() == [True, False, True, True]
    z = np.concatenate(
        [plant.features[:, 0] for plant in plants] + [draw_plant(5, [9] * 4, 8).features[:, 0]]
    )
    logits = head.logits(z)
    assert (logits[:, 1] <= np.delete(logits, 1, 1).min(1) - 10).all()


GUARDS: dict[str, list[list[int]]] = {
    "one image of a class everywhere": [[1, 1, 0], [0, 1, 1], [1, 0, 1]],
    "one image of each class in all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "one holder of a class": [[4, 0, 0], [0, 5, 0], [0, 0, 3]],
    "one plant": [[4, 3, 2]],
    "one plant of one image": [[1, 0, 0]],
    "nobody has any image": [[0, 0, 0], [0, 0, 0]],
    "a plant without images": [[0, 0, 0], [4, 3, 2], [2, 2, 1]],
    "a newcomer with one image": [[0, 1, 0], [4, 3, 2], [2, 2, 1]],
}


@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("dimensions", [2, 64])  # fewer than images, and more than all
def test_guards_leave_a_head_that_tells_known_classes_apart(name: str, dimensions: int):
    plants = draw_plants(3, GUARDS[name], dimensions)
    for number in range(len(plants)):
        head = head_of(plants, number, 3)
        assert all(
            np.isfinite(each).all() for each in (head.weight, head.bias, *head.spread, *head.means)
        )
        assert (np.linalg.eigvalsh(head.spread.precision) > 0).all()
        if dimensions == 64 and len(plants[number].labels):
            own = plants[number]
            assert (head.logits(own.features[:, 0]).argmax(1) == own.labels).mean() > 0.7
    if name in ("one holder of a class", "one plant", "one image of a class everywhere"):
        assert head.spread.between == 0


@pytest.mark.parametrize("dimensions", [2, 24, 90])
def test_class_axes_measure_cosines_in_whitened_features(dimensions: int):
    """Whitened as the precision has it; of more than 64 dimensions its rank is limited,
    which changes little here.
    """
    plants = draw_plants(5, SKEWED, dimensions)
    head, features = head_of(plants, 0, 4), draw_plant(6, [3, 3, 3, 3], dimensions).features[:, 0]
    axes = class_axes(head.means, estimate_whitening(head.spread))
    assert axes is not None
    means = head.means.means[head.means.known]
    root = np.linalg.cholesky(head.spread.precision)
    moved, apart = (features - means.mean(0)) @ root, (means - means.mean(0)) @ root
    cosines = (
        (moved @ apart.T) / np.linalg.norm(moved, axis=1)[:, None] / np.linalg.norm(apart, axis=1)
    )
    found = axes.distance(3 * features.astype(np.float32))  # of any length
    assert found == pytest.approx(1 - cosines.max(1), abs=1e-3 if dimensions <= 65 else 0.1)
    assert axes.within.shape == (min(64, dimensions - 1), dimensions)


def test_a_head_of_one_class_has_no_axes():
    plants = draw_plants(0, [[0, 2], [0, 1]], 8)
    head = head_of(plants, 0, 2)
    assert class_axes(head.means, estimate_whitening(head.spread)) is None


def test_a_plant_without_images_has_the_pooled_head():
    plants = draw_plants(1, GUARDS["a plant without images"], 20)
    head = head_of(plants, 0, 3)
    labels, z = (
        np.concatenate(each)
        for each in zip(*((p.labels, p.features.mean(1)) for p in plants), strict=True)
    )
    pooled = [z[labels == label].mean(0) for label in range(3)]
    assert np.allclose(head.means.means, pooled, atol=1e-4)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_all_is_finite_whatever_plants_have(
    counts: list[list[int]], dimensions: int, seed: int, same: bool
):
    plants = draw_plants(seed, counts, dimensions)
    if same:  # a blank frame, again and again
        plants = [Plant(np.ones_like(p.features) / np.sqrt(dimensions), p.labels) for p in plants]
    total = total_of(plants, 3)
    for plant in plants:
        own = plant.sums(3)
        head = fit(total, own)
        left_out = leave_one_out(total, own, plant.features, plant.labels)
        for each in (head.weight, head.bias, *head.spread, *head.means, *left_out):
            assert np.isfinite(each).all()
        assert 0 < fit_scale(left_out[0], plant.labels) <= 10


def test_projected_features_tell_classes_apart_as_well():
    plants = draw_plants(0, [[6, 6, 0], [0, 6, 6]], 300)
    onto = directions(300, 40)
    projected = [Plant(plant.features @ onto.T, plant.labels) for plant in plants]
    seen = draw_plant(0, [20, 20, 20], 300, number=7)
    head = head_of(projected, 0, 3)
    assert (head.logits(seen.features[:, 0] @ onto.T).argmax(1) == seen.labels).mean() > 0.9


def simulated(
    seed: int, camera: float, spread: float, plants: int, classes: int, each: int
) -> list[Plant]:
    """Plants whose means differ: by a camera's offset, the same for all classes,
    and by `spread` in each class.
    """
    random = np.random.default_rng(seed)
    d, made = 30, []
    means = random.standard_normal((classes, d)) * 0.02
    for _ in range(plants):
        own = (
            means
            + random.standard_normal(d) * camera
            + random.standard_normal((classes, d)) * spread
        )
        labels = np.repeat(np.arange(classes), random.integers(1, 2 * each, classes))
        images = own[labels] + random.standard_normal((len(labels), d)) * 0.03
        views = images[:, None] + 0 * random.standard_normal((len(labels), VIEWS, d))
        made.append(Plant(views, labels))
    return made


@pytest.mark.parametrize(("camera", "spread"), [(0.0, 0.02), (0.02, 0.0), (0.015, 0.01)])
def test_the_spread_between_plants_is_estimated_without_bias(camera: float, spread: float):
    found = [
        estimate_spread(total_of(simulated(s, camera, spread, 5, 4, 3), 4).values())
        for s in range(60)
    ]
    between = np.array([each.between for each in found])
    within = np.array([each.within for each in found])
    error = between.std(ddof=1) / np.sqrt(len(between))
    assert abs(between.mean() - 30 * (camera**2 + spread**2)) < 3.5 * error
    assert within.mean() == pytest.approx(30 * 0.03**2, rel=0.03)


def test_plants_that_do_not_differ_have_hardly_any_spread_between_them():
    found = [estimate_spread(total_of(simulated(s, 0, 0, 5, 4, 3), 4).values()) for s in range(20)]
    assert np.mean([each.between for each in found]) < 0.1 * np.mean(
        [each.within for each in found]
    )


def other_camera(seed: int, camera: np.ndarray) -> tuple[list[Plant], Means]:
    """Five plants, the first with another camera, and what it makes of the sums."""
    plants = simulated(seed, 0, 0.002, 5, 4, 6)
    first = Plant(plants[0].features + camera, plants[0].labels)
    return plants, head_of([first, *plants[1:]], 0, 4).means


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_camera_that_differs_is_recovered_as_the_plants_offset(seed: int):
    camera = np.random.default_rng(seed).standard_normal(30) * 0.06
    _, means = other_camera(seed, camera)
    length = np.linalg.norm(camera)
    assert means.offset @ camera > 0.9 * length * np.linalg.norm(means.offset)
    assert 0.3 * length < np.linalg.norm(means.offset) < 1.1 * length
    _, means = other_camera(seed, 0 * camera)
    assert np.linalg.norm(means.offset) < 0.1 * length


def left_out_by_hand(
    plants: list[Plant], number: int, group: list[int], classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and whitened cosines of a group of images,
    with everything computed anew but lambda, nu, s2 and tau2.
    """
    whole = estimate_spread(total_of(plants, classes).values())
    left = [plant if k != number else plant.without(group) for k, plant in enumerate(plants)]
    values = total_of(left, classes).values()
    single = values.singles > 0
    means = values.single_sums[single] / values.singles[single][:, None]
    scatter = values.scatter - (means * values.singles[single][:, None]).T @ means
    d = values.dimensions
    old = total_of(plants, classes).values()
    old_single = old.singles > 0
    power = (
        np.trace(old.scatter)
        - (np.square(old.single_sums[old_single]).sum(1) / old.singles[old_single]).sum()
    )
    covariance = (1 - whole.shrinkage) * scatter / whole.freedom
    covariance += whole.shrinkage * power / whole.freedom / d * np.eye(d)
    spread = whole._replace(precision=np.linalg.inv(covariance))
    own = left[number].sums(classes).values()
    found = estimate_means(
        total_of([p for k, p in enumerate(left) if k != number], classes).values(), own, spread
    )
    z = quantise(plants[number].features[group, 0])
    squared = np.array(
        [np.einsum("nd,de,ne->n", z - h, spread.precision, z - h) for h in found.means]
    ).T
    whitening = np.linalg.cholesky(spread.precision)
    middle = found.means[found.known].mean(0)
    means = (found.means - middle) @ whitening
    seen = (quantise(plants[number].features[group]).mean(1) - middle) @ whitening
    cosines = seen @ means.T / np.outer(np.linalg.norm(seen, axis=1), np.linalg.norm(means, axis=1))
    return np.einsum("nd,de,ne->n", z, spread.precision, z)[:, None] / 2 - squared / 2, np.where(
        found.known, cosines, 0
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dimensions", [5, 30])
@pytest.mark.parametrize("groups", [[], [[0, 1, 3], [4, 5], [2]]], ids=["images", "groups"])
def test_leaving_images_out_is_refitting_without_them(
    seed: int, dimensions: int, groups: list[list[int]]
):
    # An image that is left alone in its class would join single ones elsewhere; there are none of
    # these classes.
    plants = draw_plants(seed, [[3, 0, 1, 2], [2, 2, 1, 2], [0, 2, 1, 3]], dimensions)
    total = total_of(plants, 4)
    for number, plant in enumerate(plants):
        logits, cosines = leave_one_out(total, plant.sums(4), plant.features, plant.labels, groups)
        for group in groups or [[image] for image in range(len(plant.labels))]:
            expected, cosine = left_out_by_hand(plants, number, group, 4)
            assert np.allclose(logits[group], expected, rtol=1e-5, atol=1e-6)
            assert np.allclose(cosines[group], cosine, rtol=1e-4, atol=1e-6)


def test_the_only_image_of_a_class_is_no_candidate_of_its_own_left_out_head():
    plants = draw_plants(0, [[4, 4, 1], [3, 2, 0]], 12)
    total = total_of(plants, 3)
    logits, _ = leave_one_out(total, plants[0].sums(3), plants[0].features, plants[0].labels)
    assert (logits[-1, 2] < logits[-1, :2] - 9).all()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scale", [0.1, 2.5])
def test_the_scale_fits_logits_to_how_often_they_are_right(seed: int, scale: float):
    random = np.random.default_rng(seed)
    logits = random.standard_normal((4000, 5)) * 2
    labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
    assert fit_scale(logits / scale, labels) == pytest.approx(scale, rel=0.1)


def test_few_images_that_are_all_right_make_no_head_certain():
    def certainty(count: int, expected: float | None = None) -> float:
        logits = np.tile([1.0, 0.0], (count, 1))
        odds = np.exp(fit_scale(logits, np.zeros(count, int), expected))
        return float(odds / (1 + odds))

    assert 0.7 < certainty(3) < certainty(30) < 0.999
    # one image more, drawn from two classes
    assert certainty(3) == pytest.approx(1 - 1 / 8, abs=0.01)
    assert 0.73 < certainty(1, 1) < certainty(3, 1) < 0.85
    assert certainty(3, 1) < certainty(30, 1) < 0.999


def test_one_image_that_is_wrong_makes_no_head_uncertain_of_everything():
    assert 0.5 < fit_scale(np.array([[0.0, 3.0]]), np.array([0]), 1) < 0.8


def test_without_images_the_scale_stays_one():
    assert fit_scale(np.zeros((0, 4)), np.zeros(0, int)) == 1


def test_a_head_needs_no_particular_number_of_views_to_be_alike():
    """Views that are all the same: the covariance is that of images."""
    plant = draw_plant(0, [5, 6], 4)
    same = Plant(np.repeat(plant.features[:, :1], VIEWS, 1), plant.labels)
    spread = estimate_spread(collect(same.features, same.labels, 2).values())
    sample = (
        sum(np.cov(same.features[same.labels == c, 0].T, ddof=0) * (5 + c) for c in range(2)) / 9
    )
    expected = (1 - spread.shrinkage) * sample + spread.shrinkage * np.trace(sample) / 4 * np.eye(4)
    assert np.allclose(np.linalg.inv(spread.precision), expected, atol=1e-4)
    assert spread.within == pytest.approx(np.trace(sample), rel=1e-3)
