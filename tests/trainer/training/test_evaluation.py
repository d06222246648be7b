"""Figures of merit against values computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.bundle.comparison import CandidateName, Comparison
from edge.uncertainty.performance import wilson_interval
from trainer.training.evaluation import (
    accuracy,
    choose_trained,
    compare,
    macro_f1,
    paired_interval,
    predict_among,
    predict_in_service,
)

LABELS = np.array([0, 0, 0, 1, 1, 2])
PREDICTED = np.array([0, 0, 1, 1, 2, 2])


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert accuracy(PREDICTED, LABELS) == pytest.approx(4 / 6)


def test_macro_f1_is_the_mean_of_each_classs_f1() -> None:
    # Class 0: precision 2/2, recall 2/3, F1 4/5. Class 1: 1/2, 1/2, 1/2. Class 2: 1/2, 1/1, 2/3.
    assert macro_f1(PREDICTED, LABELS) == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 3)


def test_macro_f1_counts_each_class_alike_however_many_images_it_has() -> None:
    labels = np.array([0] * 98 + [1] * 2)
    assert accuracy(np.zeros(100), labels) == pytest.approx(0.98)
    assert macro_f1(np.zeros(100), labels) == pytest.approx(0.5 * 2 * 98 / 198)


def test_a_class_that_only_the_model_names_lowers_the_others_but_has_no_f1_of_its_own() -> None:
    assert macro_f1(np.array([0, 0, 5, 1]), np.array([0, 0, 0, 1])) == pytest.approx(
        (4 / 5 + 1) / 2
    )


def test_right_answers_alone_score_one_and_wrong_ones_alone_zero() -> None:
    for figure in (accuracy, macro_f1):
        assert figure(LABELS, LABELS) == 1
        assert figure(LABELS + 3, LABELS) == 0


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [  # tables of the score interval; the last is an example of Newcombe 1998
        (8, 10, 0.490, 0.943),
        (0, 10, 0.0, 0.278),
        (10, 10, 0.722, 1.0),
        (15, 148, 0.0624, 0.1605),
    ],
)
def test_wilsons_interval_is_the_published_one(
    correct: int, count: int, low: float, high: float
) -> None:
    assert wilson_interval(correct, count) == pytest.approx((low, high), abs=5e-4)


def test_wilsons_bounds_are_where_the_share_is_just_not_rejected() -> None:
    for bound in wilson_interval(13, 40):
        assert abs(13 / 40 - bound) == pytest.approx(1.959964 * np.sqrt(bound * (1 - bound) / 40))


def test_more_images_narrow_the_interval() -> None:
    widths = [np.diff(wilson_interval(3 * count, 4 * count))[0] for count in (1, 10, 100)]
    assert widths == sorted(widths, reverse=True)


def fourfold(both: int, second: int, first: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Right answers of two classifiers: images that both, only the second,
    only the first and neither got right.
    """
    counts = (both, second, first, neither)
    return np.repeat([True, False, True, False], counts), np.repeat(
        [True, True, False, False], counts
    )


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Altman et al., Statistics with Confidence, 2000, table 6.2
        ((14, 5, 0, 22), 0.011, 0.226),
        # Cavo et al., 2012, in Fagerland et al., 2017, chapter 8
        ((59, 6, 16, 80), -0.1186, -0.0046),
    ],
)
def test_newcombes_paired_interval_is_the_published_one(
    table: tuple[int, int, int, int], low: float, high: float
) -> None:
    assert paired_interval(*fourfold(*table)) == pytest.approx((low, high), abs=6e-4)


def test_a_weak_positive_correlation_counts_as_none() -> None:
    # 1 * 12 - 1 * 7 is less than half of 21
    second, first = wilson_interval(2, 21), wilson_interval(8, 21)
    below = np.hypot(2 / 21 - second[0], first[1] - 8 / 21)
    assert paired_interval(*fourfold(1, 1, 7, 12))[0] == pytest.approx(-6 / 21 - below)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_a_paired_interval_contains_the_difference_and_turns_with_its_sides(
    answers: list[tuple[bool, bool]],
) -> None:
    first, second = np.array(answers, bool).T
    low, high = paired_interval(first, second)
    assert -1 <= low <= second.mean() - first.mean() <= high <= 1
    assert low < high
    assert paired_interval(second, first) == pytest.approx((-high, -low))


@pytest.mark.parametrize("table", [(60, 0, 0, 0), (0, 0, 0, 60), (50, 0, 0, 10)])
def test_classifiers_that_always_agree_on_a_few_images_are_not_proved_equal(
    table: tuple[int, int, int, int],
) -> None:
    low, high = paired_interval(*fourfold(*table))
    assert low == pytest.approx(-high)
    assert 0.01 < high < 0.07


def test_a_paired_interval_is_narrower_where_classifiers_err_on_the_same_images() -> None:
    together, apart = (
        np.diff(paired_interval(*fourfold(40, 5, 5, 10))),
        np.diff(paired_interval(*fourfold(30, 15, 15, 0))),
    )
    assert together < 0.8 * apart


def logits_for(predictions: list[int], margin: float = 1.0) -> np.ndarray:
    """[n, 4], whose likeliest class leads by `margin`."""
    return margin * np.eye(4)[predictions]


LABELLED = np.array([0, 0, 2, 2, 2, 0] * 2)


def repeated(
    alone: np.ndarray, together: np.ndarray, mixed: np.ndarray
) -> dict[CandidateName, np.ndarray]:
    """Candidates whose logits for the first six of LABELLED are these, and for the next six the
    same.
    """
    candidates: dict[CandidateName, np.ndarray] = {
        "alone": alone,
        "together": together,
        "mixed": mixed,
    }
    return {name: np.tile(each, (2, 1)) for name, each in candidates.items()}


def compared(
    alone: np.ndarray,
    together: np.ndarray,
    mixed: np.ndarray,
    history: tuple[float, ...] = (),
    deployed: CandidateName = "mixed",
    independent: float = 1.0,
) -> Comparison:
    return compare(
        repeated(alone, together, mixed),
        LABELLED,
        [0, 2],
        history,
        deployed=deployed,
        cross_validated=False,
        independent=independent,
    )


def chosen(alone: np.ndarray, together: np.ndarray, mixed: np.ndarray) -> CandidateName:
    return choose_trained(repeated(alone, together, mixed), LABELLED, [0, 2])


def test_among_own_classes_no_other_class_is_named_however_likely_it_is() -> None:
    logits = np.array([[0.1, 9.0, 0.2, 9.0], [0.3, 9.0, 0.2, 9.0]])
    assert predict_among(logits, [0, 2]).tolist() == [2, 0]


def test_in_service_a_class_that_was_never_taught_must_be_five_times_as_likely() -> None:
    logits = np.log([[0.2, 0.9, 0.1, 0.0001], [0.2, 1.1, 0.1, 0.0001]])
    assert predict_in_service(logits, [0, 2]).tolist() == [0, 1]


def test_a_candidate_that_confuses_own_images_is_not_deployed_for_what_a_mask_would_hide() -> None:
    private, shared = logits_for([0, 0, 2, 2, 0, 0]), logits_for([0, 0, 2, 2, 2, 0])
    shared[:, 1] = 9.0  # a class that this plant never taught
    found = compared(private, shared, shared)
    assert (found.alone.accuracy, found.together.accuracy) == (5 / 6, 0.0)
    assert chosen(private, shared, shared) == "alone"


def test_the_most_accurate_candidate_is_deployed() -> None:
    worse, better = logits_for([0, 0, 2, 0, 0, 2]), logits_for([0, 0, 2, 2, 0, 0])
    assert chosen(worse, better, worse) == "together"
    assert chosen(better, worse, worse) == "alone"
    assert chosen(worse, worse, better) == "mixed"


def test_candidates_are_compared_with_training_alone_on_the_same_images() -> None:
    worse, better = logits_for([0, 0, 2, 0, 0, 2]), logits_for([0, 0, 2, 2, 0, 0])
    found = compared(worse, better, worse, deployed="together")
    assert (found.images, found.deployed) == (12, "together")
    assert (found.alone.accuracy, found.together.accuracy) == (0.5, 5 / 6)
    assert (found.together.low, found.together.high) == wilson_interval(10, 12)
    assert found.together.gain == pytest.approx(1 / 3)
    assert (found.together.gain_low, found.together.gain_high) == paired_interval(
        np.array([1, 1, 1, 0, 0, 0] * 2, bool), np.array([1, 1, 1, 1, 0, 1] * 2, bool)
    )


def test_look_alikes_are_one_piece_of_evidence() -> None:
    """Each image twice proves as much as each once."""
    worse, better = logits_for([0, 0, 2, 0, 0, 2]), logits_for([0, 0, 2, 2, 0, 0])
    found = compared(worse, better, worse, independent=0.5).together
    assert found.accuracy == 5 / 6
    assert (found.low, found.high) == pytest.approx(wilson_interval(5, 6))
    once = paired_interval(np.array([1, 1, 1, 0, 0, 0], bool), np.array([1, 1, 1, 1, 0, 1], bool))
    assert (found.gain_low, found.gain_high) == pytest.approx(once)


def test_of_equally_accurate_candidates_the_mix_is_deployed_and_training_alone_last() -> None:
    worse, better = logits_for([0, 0, 2, 0, 0, 2]), logits_for([0, 0, 2, 2, 0, 0])
    assert chosen(better, better, better) == "mixed"
    assert chosen(better, better, worse) == "together"


@pytest.mark.parametrize("name", ["alone", "together"])
def test_the_mix_is_deployed_unless_another_leads_by_two_images(name: CandidateName) -> None:
    right = logits_for(LABELLED.tolist())
    for wrong, deployed in ((0, "mixed"), (1, "mixed"), (2, name)):
        predictions = LABELLED.copy()
        predictions[:wrong] = 2 - predictions[:wrong]
        mistaken = logits_for(predictions.tolist())
        candidates: dict[CandidateName, np.ndarray] = {
            "alone": mistaken,
            "together": mistaken,
            "mixed": mistaken,
        }
        candidates[name] = right
        assert choose_trained(candidates, LABELLED, [0, 2]) == deployed


def test_a_plant_of_one_class_deploys_what_it_learnt_with_others() -> None:
    """By itself it calls everything that class, and so is always right among its own."""
    alone, together = logits_for([0, 0, 0, 0]), logits_for([0, 2, 0, 2])
    candidates: dict[CandidateName, np.ndarray] = {
        "alone": alone,
        "together": together,
        "mixed": alone,
    }
    assert choose_trained(candidates, np.zeros(4, int), [0]) == "together"


def test_guessing_is_naming_the_commonest_class() -> None:
    logits = logits_for([0, 0, 2, 2, 2, 0])
    assert compared(logits, logits, logits).guessing == 0.5


@pytest.mark.parametrize(
    ("history", "fall"),
    [
        ((0.5, 0.9, 0.5), (0.9, 0.5)),
        ((0.5, 0.9, 0.8), (0.9, 0.5)),
        ((0.3, 0.5), None),
        ((0.6,), None),
        ((), None),
    ],
)
def test_a_fall_during_training_is_told_from_two_images_on(
    history: tuple[float, ...], fall: tuple[float, float] | None
) -> None:
    logits = logits_for([0, 0, 2, 0, 0, 2])  # half are right in the end
    assert compared(logits, logits, logits, history).fall == fall
