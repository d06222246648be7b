"""What features say of a picture is guessed, and nothing is made up where they say nothing."""

import numpy as np
import pytest

from edge_node.extensions.audit.attack_scores import to_pictures
from edge_node.extensions.audit.feature_decoder import FeatureDecoder
from tests.support.audited_plant import striped
from trainer.seeding import generator


@pytest.mark.parametrize("seed", [0, 1])
def test_features_that_hold_a_picture_give_it_back(seed: int) -> None:
    own, others = striped([40, 0, 0], seed), striped([6, 0, 0], seed + 10)
    mixing = generator(seed, "mixing").standard_normal((3 * 32 * 32, 400)) / 50
    features = to_pictures(own).flatten(1).numpy() @ mixing
    decoder = FeatureDecoder(features, own)
    wanted = to_pictures(others)
    errors = {"guess": 0.0, "blind": 0.0}
    for picture, feature in zip(wanted, wanted.flatten(1).numpy() @ mixing, strict=True):
        errors["guess"] += float((decoder.guess(feature) - picture).square().mean())
        errors["blind"] += float((decoder.blind - picture).square().mean())
    assert errors["guess"] < 0.7 * errors["blind"]


@pytest.mark.parametrize("seed", [0, 1])
def test_features_that_say_nothing_give_hardly_more_than_the_mean(seed: int) -> None:
    own = striped([30, 0, 0], seed)
    features = generator(seed, "noise").standard_normal((30, 200))
    decoder = FeatureDecoder(features, own)
    guess = decoder.guess(generator(seed, "other noise").standard_normal(200))
    assert float((guess - decoder.blind).abs().mean()) < 0.05


def test_dimensions_that_are_always_zero_in_what_the_attacker_knows_do_not_spoil_a_guess() -> None:
    own = striped([20, 0, 0], 0)
    features = np.concatenate([to_pictures(own).flatten(1).numpy()[:, :300], np.zeros((20, 50))], 1)
    decoder = FeatureDecoder(features, own)
    known, strange = features[3].copy(), features[3].copy()
    strange[300:] = 5
    assert np.allclose(decoder.guess(known), decoder.guess(strange), atol=1e-5)
