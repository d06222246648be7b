"""The learning curve of a plant: accuracy by images a class,
and the class that wants more, where that is known.
"""

import msgspec
import numpy as np
import pytest

from edge_node.extensions.learning_curve.learning_curve import DRAWS, LearningCurve, Split, trace
from tests.support.counted_calls import count_calls
from tests.support.drawn_features import Plant, draw_plant, draw_plants, total_of
from trainer.seeding import generator
from trainer.statistics.lda_head import fit
from trainer.statistics.sums import VIEWS
from trainer.training.evaluation import predict_among

CLASSES = ("dent", "scratch", "stain")


def overlapping(
    counts: list[int],
    seed: int,
    *,
    noise: tuple[float, ...] = (0.8, 0.8, 0.8),
    dimensions: int = 24,
) -> Plant:
    """Unit vectors about the classes' axes; a class of more noise overlaps with others,
    however many images it has.
    """
    random = generator(seed, "overlapping", *counts)
    labels = np.repeat(np.arange(len(counts)), counts)
    means = np.zeros((len(counts), dimensions))
    means[:, : len(counts)] = 1.6 * np.eye(len(counts))
    images = means[labels] + np.array(noise)[labels, None] * random.standard_normal(
        (len(labels), dimensions)
    )
    views = images[:, None] + 0.05 * random.standard_normal((len(labels), VIEWS, dimensions))
    return Plant(views / np.linalg.norm(views, axis=2, keepdims=True), labels)


def held_out(train: Plant, test: Plant) -> tuple[np.ndarray, np.ndarray, list[list[Split]]]:
    """Features and labels of both, and the splits."""
    own, rest = np.arange(len(train.labels)), len(train.labels) + np.arange(len(test.labels))
    features, labels = (np.concatenate(each) for each in zip(train, test, strict=True))
    return features, labels, [[Split(own, rest)]] * DRAWS


def traced(train: Plant, test: Plant) -> LearningCurve:
    features, labels, splits = held_out(train, test)
    return trace(features, labels, CLASSES, splits)


def test_a_point_is_the_accuracy_of_heads_made_of_so_many_images_and_the_last_one_of_all() -> None:
    train, test = overlapping([12, 12, 3], 1), overlapping([20, 20, 20], 2)
    curve = traced(train, test)
    assert [point.images for point in curve.points] == [1, 2, 5, 12]
    sums = train.sums(3)
    right = predict_among(fit(sums, sums).logits(test.features[:, 0]), [0, 1, 2]) == test.labels
    assert curve.points[-1].accuracy.value == pytest.approx(right.mean())
    assert [each.points[-1].accuracy.value for each in curve.classes] == pytest.approx(
        right.reshape(3, 20).mean(1)
    )
    assert (
        curve.points[0].accuracy.value
        < curve.points[2].accuracy.value
        < curve.points[-1].accuracy.value
    )
    assert (curve.judged, curve.cross_validated, curve.others) == (60, False, 0)
    assert [each.images for each in curve.classes] == [12, 12, 3]


def test_the_other_plants_sums_lift_the_beginning_of_the_curve() -> None:
    plants = draw_plants(3, [[15, 15, 15]] * 4, 24)
    features, labels, splits = held_out(plants[0], draw_plant(3, [20, 20, 20], 24, number=9))
    alone = trace(features, labels, CLASSES, splits)
    together = trace(features, labels, CLASSES, splits, total_of(plants[1:], 3))
    assert together.others == 135
    assert together.points[0].accuracy.value > alone.points[0].accuracy.value


def alike(counts: list[int], seed: int) -> Plant:
    """As `overlapping`, of four classes: the last two are hardly told apart by however many
    images.
    """
    random = generator(seed, "alike", *counts)
    labels = np.repeat(np.arange(4), counts)
    means = np.eye(4, 24)
    means[3] = means[2] + 0.25 * np.eye(24)[4]
    images = means[labels] + 0.4 * random.standard_normal((len(labels), 24))
    views = images[:, None] + 0.05 * random.standard_normal((len(labels), VIEWS, 24))
    return Plant(views / np.linalg.norm(views, axis=2, keepdims=True), labels)


def test_the_class_that_wants_more_is_one_that_more_would_help_not_one_that_stays_hard() -> None:
    """The first class has four images; of the last two fewest are right.

    What really helps, fresh images tell.
    """
    names, counts = ("dent", "scratch", "stain", "smear"), [4, 60, 60, 60]
    wanted, lowest, gained = [], [], []
    for seed in range(6):
        train, more, test = (
            alike(counts, seed),
            alike([60] * 4, 100 + seed),
            alike([150] * 4, 200 + seed),
        )
        features, labels, splits = held_out(train, test)
        curve = trace(features, labels, names, splits)
        wanted.append(curve.wanted)
        lowest.append(min(curve.classes, key=lambda each: each.points[-1].accuracy.value).name)

        def right(plant: Plant, judge: Plant = test) -> float:
            return float(
                (
                    fit(plant.sums(4), plant.sums(4)).logits(judge.features[:, 0]).argmax(1)
                    == judge.labels
                ).mean()
            )

        doubled = [np.flatnonzero(more.labels == label)[: counts[label]] for label in range(4)]
        larger = [
            Plant(*(np.concatenate([a, b[each]]) for a, b in zip(train, more, strict=True)))
            for each in doubled
        ]
        gained.append([right(plant) - right(train) for plant in larger])
    assert int(np.mean(gained, 0).argmax()) == 0
    assert set(wanted) <= {"dent", ""}, "no other class is named"
    assert wanted.count("dent") >= 4
    assert lowest.count("dent") <= 2, "a class with the fewest right is often another one"


def test_where_no_class_gains_none_is_named_and_more_are_said_to_be_of_little_use() -> None:
    noise = (0.3, 0.3, 0.3)
    curve = traced(
        overlapping([60, 60, 60], 6, noise=noise), overlapping([200, 200, 200], 7, noise=noise)
    )
    assert curve.wanted == ""
    assert "hardly help" in curve.describe_curve()
    assert curve.describe_class().startswith("no class has clearly gained")


def test_where_the_last_doubling_helped_more_are_likely_to() -> None:
    curve = traced(overlapping([6, 6, 2], 8), overlapping([200, 200, 200], 9))
    assert curve.wanted == "stain"
    assert "stain wants more images most" in curve.describe_class()
    assert curve.gain is not None
    assert curve.gain.low > 0
    assert "likely to help" in curve.describe_curve()


def test_few_judged_images_tell_nothing_and_that_is_said() -> None:
    curve = traced(overlapping([6, 6, 6], 8), overlapping([4, 4, 4], 9))
    assert "these images cannot tell" in curve.describe_curve()
    low, high = curve.points[-1].accuracy.low, curve.points[-1].accuracy.high
    assert high - low > 0.2


def test_a_class_with_one_image_is_judged_and_its_gain_is_unknown() -> None:
    curve = traced(overlapping([8, 8, 1], 8), overlapping([9, 9, 9], 9))
    assert [each.gain is None for each in curve.classes] == [False, False, True]
    assert curve.describe_class().endswith("too few images to tell of: stain")
    single = traced(overlapping([1, 1, 1], 8), overlapping([9, 9, 9], 9))
    assert single.gain is None
    assert [point.images for point in single.points] == [1]
    assert "nothing can be said" in single.describe_curve()


@pytest.mark.slow
def test_the_interval_covers_what_another_plant_with_as_many_images_would_see() -> None:
    """Accuracy with five images a class, on 90 held-out ones of 40 images a class,
    against that of fresh ones.
    """
    fresh = [overlapping([5, 5, 5], seed) for seed in range(100, 160)]
    judge = overlapping([300, 300, 300], 99)
    truth = np.mean(
        [
            (
                predict_among(
                    fit(each.sums(3), each.sums(3)).logits(judge.features[:, 0]), [0, 1, 2]
                )
                == judge.labels
            ).mean()
            for each in fresh
        ]
    )
    found = [
        traced(overlapping([40, 40, 40], seed), overlapping([30, 30, 30], 200 + seed)).points[2]
        for seed in range(40)
    ]
    covered = sum(point.accuracy.low <= truth <= point.accuracy.high for point in found)
    assert all(point.images == 5 for point in found)
    assert 36 <= covered <= 40
    assert np.mean([point.accuracy.high - point.accuracy.low for point in found]) < 0.25


def test_every_image_is_judged_once_by_cross_validation() -> None:
    plant = overlapping([10, 10, 10], 3)
    positions = np.arange(30)
    splits = [
        [
            Split(positions[positions % 5 != fold], positions[positions % 5 == fold])
            for fold in range(5)
        ]
    ] * DRAWS
    curve = trace(plant.features, plant.labels, CLASSES, splits)
    assert (curve.judged, curve.cross_validated) == (30, True)
    assert [each.images for each in curve.classes] == [10, 10, 10]
    assert curve.points[-1].images == 8


def test_the_same_images_give_the_same_curve_and_a_program_can_read_it() -> None:
    train, test = overlapping([8, 8, 8], 1), overlapping([9, 9, 9], 2)
    encoded = msgspec.json.encode(traced(train, test))
    assert encoded == msgspec.json.encode(traced(train, test))
    assert msgspec.json.decode(encoded, type=LearningCurve) == traced(train, test)


def test_one_class_or_no_image_to_judge_is_no_curve() -> None:
    with pytest.raises(ValueError, match="one class"):
        traced(overlapping([8, 0, 0], 1), overlapping([8, 8, 8], 2))
    with pytest.raises(ValueError, match="left out"):
        traced(overlapping([8, 8, 0], 1), overlapping([0, 0, 8], 2))


@pytest.mark.slow
def test_a_curve_of_a_thousand_images_takes_hardly_more_steps_than_one_of_a_hundred() -> None:
    def steps(count: int) -> int:
        plant = draw_plant(0, [count - 2 * (count // 3), count // 3, count // 3], 64)
        fold = np.arange(count) % 5
        splits = [
            [Split(np.flatnonzero(fold != each), np.flatnonzero(fold == each)) for each in range(5)]
        ] * DRAWS
        return count_calls(lambda: trace(plant.features, plant.labels, CLASSES, splits))

    assert steps(1000) < 1.5 * steps(100)
