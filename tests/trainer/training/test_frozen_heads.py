"""Heads of a frozen encoder: no image judges itself, and the better head gets the share."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.progress import Stopped, ignore, watched
from trainer.statistics import logistic_head
from trainer.statistics.logistic_head import STRENGTHS, Linear
from trainer.training import frozen_heads
from trainer.training.frozen_heads import LeftOut, Mixture, Together

CLASSES = 4
WIDTH = 5
VIEWS = 2
OWN = [0, 2, 3]
LABELS = np.repeat(OWN, 4)
FOLDS = [np.arange(start, start + 2) for start in range(0, len(LABELS), 2)]
ELSEWHERE = np.full(CLASSES, 3)

seeds = st.integers(0, 10_000)
fold_numbers = st.integers(0, len(FOLDS) - 1)


def drawn(labels: np.ndarray, seed: int, noise: float = 0.3) -> np.ndarray:
    """Features [n, VIEWS, WIDTH] of length one, about a direction for each class."""
    random = np.random.default_rng(seed)
    features = np.eye(CLASSES, WIDTH)[labels][:, None]
    features = features + noise * random.normal(size=(len(labels), VIEWS, WIDTH))
    return np.asarray(features / np.linalg.norm(features, axis=2, keepdims=True))


def consensus(features: np.ndarray, labels: np.ndarray, centres: np.ndarray) -> Linear:
    """The means of classes, of these images and of others' at the centres."""
    sums = centres.copy()
    np.add.at(sums, labels, features.mean(1))
    counts = centres.any(1) + np.bincount(labels, minlength=CLASSES)
    means = sums / np.maximum(counts, 1)[:, None]
    return Linear(4 * means, -2 * np.square(means).sum(1))


def left_out(
    features: np.ndarray,
    labels: np.ndarray,
    centres: np.ndarray,
    folds: list[np.ndarray] = FOLDS,
    elsewhere: np.ndarray = ELSEWHERE,
) -> LeftOut:
    def fit_together(kept: np.ndarray) -> Together:
        return Together(consensus(features[kept], labels[kept], centres))

    return frozen_heads.leave_out(features, labels, folds, elsewhere, fit_together)


def predicted(found: LeftOut, rows: np.ndarray) -> list[np.ndarray]:
    """All that heads say of these images."""
    return [found.together[rows], *(found.alone[strength][rows] for strength in STRENGTHS)]


@settings(max_examples=15, deadline=None)
@given(seed=seeds, number=fold_numbers)
def test_what_is_said_of_an_image_knows_neither_its_label_nor_the_others_of_its_fold(
    seed: int, number: int
) -> None:
    features = drawn(LABELS, seed)
    centres = np.eye(CLASSES, WIDTH)
    fold = FOLDS[number]
    before = predicted(left_out(features, LABELS, centres), fold)
    labels = LABELS.copy()
    labels[fold] = (labels[fold] + 1) % CLASSES
    elsewhere = features.copy()
    elsewhere[fold[1:]] = drawn(LABELS[fold[1:]], seed + 1, 5.0)
    elsewhere[fold[0], 1:] = 1  # its other views: the first one is classified
    after = predicted(left_out(elsewhere, labels, centres), fold)
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one[0], other[0])


def test_what_is_said_of_an_image_is_what_heads_say_that_were_made_of_the_others() -> None:
    features = drawn(LABELS, 1)
    centres = np.eye(CLASSES, WIDTH)
    found = left_out(features, LABELS, centres)
    for fold in FOLDS:
        kept = np.setdiff1d(np.arange(len(LABELS)), fold)
        together = consensus(features[kept], LABELS[kept], centres)
        assert np.array_equal(found.together[fold], together.logits(features[fold, 0]))
        for strength in STRENGTHS:
            alone = logistic_head.fit(features[kept], LABELS[kept], CLASSES, strength)
            assert np.array_equal(found.alone[strength][fold], alone.logits(features[fold, 0]))


def test_a_class_that_one_fold_shows_is_known_by_others_images_alone() -> None:
    labels = np.array([0, 0, 0, 0, 2, 2, 3, 3])
    folds = [np.array(each) for each in ([0, 1], [2, 3], [4, 5], [6, 7])]
    centres = np.eye(CLASSES, WIDTH)
    centres[3] = 0  # nobody else has this class
    elsewhere = np.array([2, 0, 6, 0])
    found = left_out(drawn(labels, 1), labels, centres, folds, elsewhere)
    assert found.repeated.tolist() == [True] * 4 + [False] * 4
    assert found.known.tolist() == [True] * 6 + [False] * 2
    # of six images of class 0, of eight of class 2, of two of class 3
    assert found.remaining == pytest.approx([4 / 6] * 4 + [6 / 8] * 2 + [0] * 2)


def test_novelty_is_that_of_heads_without_the_image_where_all_of_them_tell() -> None:
    features = drawn(LABELS, 1)
    head = Linear(np.ones((CLASSES, WIDTH)), np.zeros(CLASSES))

    def fit(kept: np.ndarray) -> Together:
        return Together(head, lambda seen: np.full(len(seen), float(kept.sum())))

    found = frozen_heads.leave_out(features, LABELS, FOLDS, ELSEWHERE, fit)
    assert found.novelty is not None
    for fold in FOLDS:
        assert set(found.novelty[fold]) == {np.arange(len(LABELS)).sum() - fold.sum()}

    def fit_some(kept: np.ndarray) -> Together:
        return fit(kept) if 0 in kept else Together(head)

    found = frozen_heads.leave_out(features, LABELS, FOLDS, ELSEWHERE, fit_some)
    assert found.novelty is None


@settings(max_examples=15, deadline=None)
@given(seed=seeds, number=fold_numbers)
def test_the_choice_for_a_fold_is_made_without_its_labels(seed: int, number: int) -> None:
    features = drawn(LABELS, seed, 0.8)
    centres = np.eye(CLASSES, WIDTH)
    found = left_out(features, LABELS, centres)
    together = consensus(features, LABELS, centres)
    before = frozen_heads.judge(features, LABELS, OWN, found, together)
    fold = FOLDS[number]
    labels = LABELS.copy()
    labels[fold] = OWN[(OWN.index(labels[fold[0]]) + 1) % len(OWN)]
    after = frozen_heads.judge(features, labels, OWN, found, together)
    np.testing.assert_array_equal(
        before.logits[before.deployed][fold], after.logits[after.deployed][fold]
    )


def test_with_one_image_of_each_class_the_consensus_head_is_deployed() -> None:
    labels = np.array(OWN)
    features = drawn(labels, 1)
    centres = np.eye(CLASSES, WIDTH)
    found = left_out(features, labels, centres, [np.array([each]) for each in range(3)])
    together = consensus(features, labels, centres)
    judged = frozen_heads.judge(features, labels, OWN, found, together)
    assert judged.deployed == "together"
    factor = np.linalg.norm(judged.head.weight) / np.linalg.norm(together.weight)
    np.testing.assert_allclose(judged.head.weight, factor * together.weight)
    np.testing.assert_allclose(judged.head.bias, factor * together.bias)


def test_a_plant_of_one_class_deploys_the_consensus_head() -> None:
    labels = np.zeros(6, int)
    features = drawn(labels, 1)
    centres = np.eye(CLASSES, WIDTH)
    found = left_out(features, labels, centres, FOLDS[:3])
    judged = frozen_heads.judge(features, labels, [0], found, consensus(features, labels, centres))
    assert judged.deployed == "together"


@pytest.mark.parametrize("best", ["alone", "together"])
def test_the_head_that_is_right_of_unseen_groups_is_deployed(best: str) -> None:
    """Others call classes otherwise; or the plant's own images show nothing but noise."""
    labels = np.repeat(OWN, 30)
    folds = [np.arange(start, start + 5) for start in range(0, len(labels), 5)]
    features = drawn(labels, 1, 0.1 if best == "alone" else 1.5)
    if best == "together":
        features[:, 1:] = np.random.default_rng(2).normal(size=features[:, 1:].shape)
    centres = 5.0 * np.eye(CLASSES, WIDTH)[[2, 1, 3, 0] if best == "alone" else [0, 1, 2, 3]]
    head = Linear(centres, np.zeros(CLASSES))
    found = frozen_heads.leave_out(features, labels, folds, ELSEWHERE, lambda kept: Together(head))
    judged = frozen_heads.judge(features, labels, OWN, found, head)
    right = {name: (each.argmax(1) == labels).mean() for name, each in judged.logits.items()}
    assert max(right["alone"], right["together"]) == right[best]
    assert judged.deployed == best


def evidence(right: np.ndarray, together_right: np.ndarray, classes: int = CLASSES) -> LeftOut:
    """Of LABELS: the plant's own head is right of some, the consensus head of others."""
    count = len(right)
    labels = np.resize(LABELS, count)
    wrong = np.array(OWN)[(np.searchsorted(OWN, labels) + 1) % len(OWN)]
    alone = 2.0 * np.eye(classes)[np.where(right, labels, wrong)]
    together = 2.0 * np.eye(classes)[np.where(together_right, labels, wrong)]
    everything = np.ones(count, bool)
    folds = [np.array([number]) for number in range(count)]
    return LeftOut(
        folds=folds,
        together=together,
        alone=dict.fromkeys(STRENGTHS, alone),
        known=everything,
        repeated=everything,
        remaining=np.ones(count),
        novelty=None,
    )


def share(found: LeftOut) -> float:
    count = len(found.known)
    labels = np.resize(LABELS, count)
    return frozen_heads.fit_mixture(found, labels, OWN, np.arange(count)).share


@pytest.mark.parametrize("count", [12, 48])
def test_the_better_the_own_head_does_the_more_it_gets(count: int) -> None:
    together_right = np.arange(count) % 3 > 0
    shares = []
    for right in range(count // 2, count + 1, count // 12):
        shares.append(share(evidence(np.arange(count) < right, together_right)))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]


def test_more_images_that_say_the_same_move_the_share_further() -> None:
    def of(times: int, own: bool) -> float:
        some = np.tile(np.arange(12) % 6 > 0, times)
        every = np.ones(12 * times, bool)
        return share(evidence(every, some) if own else evidence(some, every))

    better = [of(times, own=True) for times in (1, 2, 4, 16)]
    worse = [of(times, own=False) for times in (1, 2, 4, 16)]
    assert better == sorted(better, reverse=True)
    assert worse == sorted(worse)
    assert (better[-1], worse[-1]) == (0, 1)
    assert better[0] > 0.05, "a dozen images do not decide"


def test_without_evidence_the_consensus_head_has_the_odds() -> None:
    alike = np.ones(12, bool)
    assert 0.5 < share(evidence(alike, alike)) < 1


heads: st.SearchStrategy[Any] = st.builds(
    lambda seed: Linear(
        np.random.default_rng(seed).normal(size=(CLASSES, WIDTH)),
        np.random.default_rng(seed + 1).normal(size=CLASSES),
    ),
    seeds,
)


@given(
    together=heads,
    alone=heads,
    mixed=st.floats(0, 1),
    scales=st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)),
    own=st.sets(st.integers(0, CLASSES - 1), min_size=1).map(sorted),
    seed=seeds,
)
def test_the_mixture_is_one_linear_head_and_keeps_what_it_says_of_other_classes(
    together: Linear,
    alone: Linear,
    mixed: float,
    scales: tuple[float, float],
    own: list[int],
    seed: int,
) -> None:
    features = np.random.default_rng(seed).normal(size=(7, WIDTH))
    mixture = Mixture(1.0, *scales, mixed)
    logits = mixture.combine(together.logits(features), alone.logits(features), own)
    head = mixture.head(together, alone, own)
    np.testing.assert_allclose(head.logits(features), logits, atol=1e-9)
    scaled = scales[0] * together.logits(features)
    others = np.setdiff1d(np.arange(CLASSES), own)
    np.testing.assert_allclose(logits[:, others], scaled[:, others])
    np.testing.assert_allclose(logits[:, own].mean(1), scaled[:, own].mean(1), atol=1e-9)


@pytest.mark.parametrize(("mixed", "name"), [(1.0, "together"), (0.0, "alone"), (0.3, "mixed")])
def test_a_mixture_of_one_head_alone_says_among_own_classes_what_that_one_says(
    mixed: float, name: str
) -> None:
    random = np.random.default_rng(1)
    together = random.normal(size=(9, CLASSES))
    alone = random.normal(size=(9, CLASSES))
    mixture = Mixture(1.0, 1.0, 1.0, mixed)
    assert mixture.name == name
    taken = mixture.combine(together, alone, OWN)[:, OWN].argmax(1)
    said = {"together": together, "alone": alone}.get(name)
    if said is not None:
        assert np.array_equal(taken, said[:, OWN].argmax(1))


def test_after_a_stop_no_further_fold_is_left_out() -> None:
    features = drawn(LABELS, 0)
    fitted: list[np.ndarray] = []

    def fit_together(kept: np.ndarray) -> Together:
        fitted.append(kept)
        return Together(consensus(features[kept], LABELS[kept], np.zeros((CLASSES, WIDTH))))

    with pytest.raises(Stopped), watched(ignore, lambda: len(fitted) == 2):
        frozen_heads.leave_out(features, LABELS, FOLDS, ELSEWHERE, fit_together)
    assert len(fitted) == 2
