"""Attacks on sums of features: they tell what can be told, and nothing where nothing is left."""

import numpy as np
import pytest

from edge_node.extensions.audit import sum_attacks
from edge_node.extensions.audit.contributions import observe
from edge_node.extensions.audit.exposure import Exposure, Found, What
from edge_node.extensions.audit.parts import Parts
from tests.support.audited_plant import drafted, striped
from trainer.methods import make


def attacked(counts: list[int], seed: int = 0, **changes: object) -> Found:
    spec, broadcast = drafted("gaussian", **changes)
    parts = Parts(
        striped(counts, seed), striped(counts, seed + 100), striped([3, 3, 3], seed + 200)
    )
    (seen,) = observe(spec, broadcast, parts.sent, seed, lambda: None)
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    assert method.statistics is not None
    return sum_attacks.attack(seen, method.statistics, parts, seed)


def of(found: Found, what: What) -> Exposure:
    (exposure,) = [each for each in found.exposures if each.what == what]
    return exposure


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_of_few_images_each_is_told_exactly_from_the_span_of_their_features(seed: int) -> None:
    found = attacked([2, 2, 1], seed)  # 40 views in 64 dimensions
    assert of(found, "membership").value == 1
    assert of(found, "membership").told == 1


@pytest.mark.slow
def test_the_more_images_are_in_a_sum_the_less_it_tells_of_one() -> None:
    few, many = (of(attacked([count] * 3), "membership").value for count in (2, 60))
    assert many < 0.75 < few


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_counts_are_read_from_open_sums_and_hidden_among_others_by_masked_ones(seed: int) -> None:
    assert of(attacked([8, 1, 0], seed), "counts").value == 1
    masked = of(attacked([8, 1, 0], seed, secure_aggregation=True, aggregate="mean"), "counts")
    assert masked.value < 0.8


@pytest.mark.slow
def test_noise_hides_images_and_the_more_the_smaller_epsilon_is() -> None:
    loud, quiet = (
        np.mean(
            [
                of(attacked([4, 4, 4], seed, privacy={"epsilon": epsilon}), "membership").value
                for seed in range(4)
            ]
        )
        for epsilon in ("0.1", "5000")
    )
    assert 0.3 < loud < 0.65
    assert quiet > max(0.65, loud + 0.1)


@pytest.mark.slow
def test_the_mean_of_a_class_gives_a_picture_that_is_like_its_images_where_it_has_one() -> None:
    found = attacked([1, 1, 1])
    assert found.pictures[0].made.shape == (3, 32, 32, 3)
    assert found.pictures[0].nearest.shape == (3, 32, 32, 3)
    assert 0 <= of(found, "pictures").chance <= 1
