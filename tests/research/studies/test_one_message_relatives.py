"""Relatives of the consensus head: each makes what its paper says of plants' messages."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from research.studies.consensus_head import Features, Logits, Trial
from research.studies.one_message_relatives import (
    METHODS,
    Federation,
    Outcome,
    afl,
    fedcgs,
    fedpft,
    nearest_mean,
    rows,
)
from tests.support.drawn_features import Plant, draw_plants
from trainer.statistics.sums import VIEWS

CLASSES, DIMENSIONS = 4, 30  # of these classes nobody has the last
PLANTS = draw_plants(0, [[4, 3, 0, 0], [0, 5, 1, 0], [2, 0, 4, 0]], DIMENSIONS)
LATER = np.concatenate(
    [plant.features[:, 0] for plant in draw_plants(0, [[20, 20, 20, 0]], DIMENSIONS)]
)
LABELS = np.repeat(np.arange(3), 20)


def pool(plants: list[Plant]) -> Plant:
    """One plant with all images."""
    return Plant(*(np.concatenate(each) for each in zip(*plants, strict=True)))


def federation(plants: list[Plant]) -> Federation:
    return Federation.of(
        [Features(plant.features, plant.labels, {}) for plant in plants], CLASSES, seed=0
    )


def only(heads: list[Logits]) -> np.ndarray:
    """What all plants' heads say of later images in common."""
    first, *rest = [head(LATER) for head in heads]
    assert all(np.array_equal(first, each) for each in rest)
    return first


def test_afl_is_ridge_regression_on_the_pooled_images():
    views, labels = pool(PLANTS)
    ridge = Ridge(alpha=0.1 * VIEWS, fit_intercept=False)  # of each view, where ours is of an image
    ridge.fit(views.reshape(-1, DIMENSIONS), np.eye(CLASSES)[np.repeat(labels, VIEWS)])
    assert np.allclose(
        only(afl(federation(PLANTS), ridge=0.1))[:, :3], ridge.predict(LATER)[:, :3], atol=1e-3
    )


def test_fedncm_is_the_cosine_with_the_pooled_means():
    views, labels = pool(PLANTS)
    for label, cosines in enumerate(only(nearest_mean(federation(PLANTS)))[:, :3].T):
        mean = views[labels == label].mean((0, 1))
        assert np.allclose(cosines, LATER @ mean / np.linalg.norm(mean), atol=1e-4)


@pytest.mark.parametrize("name", ["FedNCM", "FedCGS", "AFL"])
def test_how_images_are_shared_among_plants_makes_no_difference(name):
    make = METHODS[name].heads
    apart, together = (only(make(federation(plants)))[:, :3] for plants in (PLANTS, [pool(PLANTS)]))
    assert np.allclose(apart, together, atol=1e-6 * np.abs(together).max())


def test_fedcgs_scatters_about_common_means():
    images = pool(PLANTS)
    assert not np.allclose(
        only(fedcgs(federation(PLANTS))),
        only(METHODS["pooled means"].heads(federation(PLANTS))),
        atol=1e-2,
    )
    alone = federation([images])
    assert np.allclose(only(fedcgs(alone)), only(METHODS["pooled means"].heads(alone)))


def test_fedpft_learns_from_draws_of_each_plants_gaussians():
    first, again, other = (
        only(fedpft(federation(PLANTS)._replace(seed=seed), inverse_penalty=100.0))
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first[:, :3], other[:, :3])


def test_fedpfts_gaussians_have_their_images_means_and_widths():
    """Without any width the draws are the means; with it they scatter."""
    narrow = [
        plant._replace(
            features=np.stack(
                [plant.features[plant.labels == c].mean((0, 1)) for c in plant.labels]
            )
        )
        for plant in PLANTS
    ]
    narrow = [
        plant._replace(features=np.repeat(plant.features[:, None], VIEWS, 1)) for plant in narrow
    ]
    views, labels = pool(narrow)
    model = LogisticRegression(C=100.0, max_iter=1000).fit(
        views.reshape(-1, DIMENSIONS), np.repeat(labels, VIEWS)
    )
    learned = only(fedpft(federation(narrow), inverse_penalty=100.0))[:, :3]
    assert np.allclose(learned, model.predict_log_proba(LATER), atol=1e-2)
    assert not np.allclose(
        learned, only(fedpft(federation(PLANTS), inverse_penalty=100.0))[:, :3], atol=0.1
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_class_that_nobody_has_is_never_named_and_others_mostly_right(name):
    for head in METHODS[name].heads(federation(PLANTS)):
        named = head(LATER).argmax(1)
        assert 3 not in named
        assert (named == LABELS).mean() > (0.4 if name == "own sums alone" else 0.7)


def test_a_plant_sends_what_a_method_needs_of_it():
    sent = {name: method.numbers(3, 6, 1280) for name, method in METHODS.items()}
    assert sent["own sums alone"] == 0
    assert sent["FedNCM"] == 3 * 1281
    assert sent["FedPFT"] == 3 * 2561
    assert sent["AFL"] == 6 * 1280 + 1280 * 1281 // 2
    assert (
        sent["FedNCM"]
        < sent["FedPFT"]
        < sent["AFL"]
        < sent["FedCGS"]
        < sent["gaussian"]
        == sent["pooled means"]
    )


def outcome(samples: int, seed: int, base: float, other: float) -> Outcome:
    trial = Trial(
        dataset="neu",
        pool="report",
        partition="disjoint",
        classes=3,
        samples=samples,
        seed=seed,
        encoder="imagenet",
    )
    return Outcome(
        trial=trial,
        figures={"gaussian": (base, base), "FedNCM": (other, 0.5)},
        megabytes={"gaussian": 3.0, "FedNCM": 0.01},
        seconds=1.0,
    )


def test_differences_have_settings_as_blocks():
    """The settings' differences are 10 and 20, though seeds' are 0 to 30."""
    found = list(
        rows(
            [
                outcome(3, 0, 0.6, 0.6),
                outcome(3, 1, 0.8, 0.6),
                outcome(5, 0, 0.7, 0.6),
                outcome(5, 1, 0.9, 0.6),
            ]
        )
    )
    assert found == [
        ["gaussian", "75.0", "75.0", "", "", "3.000"],
        ["FedNCM", "60.0", "50.0", "+15.0 ± 63.5", "+25.0 ± 63.5", "0.010"],
    ]
