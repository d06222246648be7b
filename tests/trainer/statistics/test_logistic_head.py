"""A plant's own logistic regression: what it names, and what it must not depend on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from trainer.statistics import logistic_head
from trainer.statistics.logistic_head import STRENGTHS

CLASSES = 5
WIDTH = 6


def drawn(
    labels: np.ndarray, seed: int, views: int = 1, noise: float = 0.1, offset: float = 0.5
) -> np.ndarray:
    """Features [n, views, WIDTH] of length one, about a direction for each class."""
    random = np.random.default_rng(seed)
    centres = np.eye(CLASSES, WIDTH)[labels] + offset
    features = centres[:, None] + noise * random.normal(size=(len(labels), views, WIDTH))
    return np.asarray(features / np.linalg.norm(features, axis=2, keepdims=True))


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("offset", [0.0, 20.0])  # encoders' features may nearly be one direction
def test_unseen_images_of_taught_classes_are_told_apart(strength: float, offset: float) -> None:
    labels = np.repeat([0, 2, 3], 10)
    head = logistic_head.fit(drawn(labels, 1, 8, offset=offset), labels, CLASSES, strength)
    unseen = drawn(labels, 2, offset=offset)[:, 0]
    assert (head.logits(unseen).argmax(1) == labels).all()


@settings(max_examples=20, deadline=None)
@given(
    known=st.sets(st.integers(0, CLASSES - 1), min_size=1, max_size=CLASSES - 1),
    seed=st.integers(0, 1000),
    strength=st.sampled_from(STRENGTHS),
)
def test_a_class_without_an_image_is_named_for_no_feature(
    known: set[int], seed: int, strength: float
) -> None:
    """However an image looks: also where it is least like each class."""
    labels = np.resize(sorted(known), 3 * len(known))
    head = logistic_head.fit(drawn(labels, seed, 2, 0.5), labels, CLASSES, strength)
    anything = np.random.default_rng(seed).normal(size=(200, WIDTH))
    anything /= np.linalg.norm(anything, axis=1, keepdims=True)
    weight = head.weight[sorted(known)]
    against = -weight / np.maximum(np.linalg.norm(weight, axis=1, keepdims=True), 1e-12)
    logits = head.logits(np.concatenate([anything, against]))
    unknown = sorted(set(range(CLASSES)) - known)
    assert not head.weight[unknown].any()
    assert logits[:, unknown].max() < logits[:, sorted(known)].min() - 5


def test_with_one_class_alone_every_image_is_of_it() -> None:
    labels = np.full(4, 3)
    head = logistic_head.fit(drawn(labels, 1), labels, CLASSES, 1.0)
    assert (head.logits(drawn(np.arange(5), 2)[:, 0]).argmax(1) == 3).all()


def test_of_two_classes_one_gains_what_the_other_loses() -> None:
    labels = np.array([1, 4] * 6)
    head = logistic_head.fit(drawn(labels, 1, 2), labels, CLASSES, 1.0)
    logits = head.logits(drawn(labels, 2)[:, 0])
    np.testing.assert_allclose(logits[:, 1], -logits[:, 4])
    assert np.abs(logits[:, 1]).min() > 0.1


@pytest.mark.parametrize("classes", [(0, 3), (0, 2, 3, 4)])
@pytest.mark.parametrize("views", [2, 8])
def test_an_image_counts_once_however_many_views_it_has(
    classes: tuple[int, ...], views: int
) -> None:
    labels = np.repeat(classes, 5)
    features = drawn(labels, 1, noise=0.6)
    once = logistic_head.fit(features, labels, CLASSES, 1.0)
    often = logistic_head.fit(np.repeat(features, views, axis=1), labels, CLASSES, 1.0)
    np.testing.assert_allclose(often.weight, once.weight, atol=1e-2)
    np.testing.assert_allclose(often.bias, once.bias, atol=1e-2)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("classes", [(0, 3), (0, 2, 4)])
def test_the_linear_head_says_what_the_regression_says(
    classes: tuple[int, ...], strength: float
) -> None:
    """Centred and divided by one number, with the same probabilities among the taught classes."""
    labels = np.repeat(classes, 6)
    features = drawn(labels, 1, noise=0.6)
    rows = features[:, 0]
    middle = rows.mean(0)
    scale = np.sqrt(np.square(rows - middle).mean())
    model = LogisticRegression(C=strength, max_iter=300).fit((rows - middle) / scale, labels)
    unseen = drawn(labels, 2, noise=0.6)[:, 0]
    head = logistic_head.fit(features, labels, CLASSES, strength)
    powers = np.exp(head.logits(unseen)[:, list(classes)])
    expected = model.predict_proba((unseen - middle) / scale)
    np.testing.assert_allclose(powers / powers.sum(1, keepdims=True), expected, atol=1e-6)


def test_the_same_strength_means_the_same_for_features_of_any_size() -> None:
    labels = np.repeat([0, 2, 3], 5)
    features = drawn(labels, 1, 2, 0.6)
    head = logistic_head.fit(features, labels, CLASSES, 1.0)
    small = logistic_head.fit(features / 100, labels, CLASSES, 1.0)
    unseen = drawn(labels, 2)[:, 0]
    taught = [0, 2, 3]
    np.testing.assert_allclose(
        small.logits(unseen / 100)[:, taught], head.logits(unseen)[:, taught], atol=1e-2
    )
