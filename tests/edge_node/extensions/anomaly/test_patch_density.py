"""A Gaussian of good features tells what is strange,
and its threshold rejects as few good images as it says.
"""

import numpy as np
import pytest
import torch

from edge_node.extensions.anomaly.patch_density import (
    FALSE_REJECTS,
    Judgement,
    PatchDensity,
    cross_validate,
)


def drawn(count: int, seed: int) -> torch.Tensor:
    """Features [n, 4, 6, 6] that are correlated, of different sizes, and not centred."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.tensor([[3.0, 0, 0, 0], [1, 1, 0, 0], [0, 2, 1, 0], [0, 0, 1, 4]])
    values = torch.randn((count, 6, 6, 4), generator=random) @ mixing + torch.tensor(
        [5.0, -2, 0, 100]
    )
    return values.permute(0, 3, 1, 2)


@pytest.mark.parametrize("seed", [1, 2])
def test_good_places_are_at_distance_one_on_average_whatever_their_features_scale(
    seed: int,
) -> None:
    places, images = PatchDensity.fit(drawn(50, seed))(drawn(50, seed + 100))
    assert places.shape == (50, 6, 6)
    assert places.mean().item() == pytest.approx(1, abs=0.1)
    assert (images > places.mean((1, 2))).all()


def test_one_strange_place_is_found_where_it_is_and_makes_its_image_strange() -> None:
    density, images = PatchDensity.fit(drawn(50, 1)), drawn(20, 2)
    images[7, :, 2, 3] += torch.tensor([0.0, 9, 0, 0])
    places, found = density(images)
    assert found.argmax() == 7
    row, column = divmod(int(places[7].argmax()), 6)
    assert abs(row - 2) <= 1
    assert abs(column - 3) <= 1


def test_an_image_is_never_judged_by_a_density_that_was_fitted_with_it_or_its_like() -> None:
    features = drawn(25, 3)
    features[[4, 8]] += 40.0  # a pair of look-alikes: of either the other would make it ordinary
    apart, _ = cross_validate(features, np.arange(25))
    together = np.arange(25)
    together[8] = 4
    kept, _ = cross_validate(features, together)
    assert (kept[[4, 8]] > 3 * apart[[4, 8]]).all()


def test_strange_images_are_judged_by_the_same_densities() -> None:
    good, strange = cross_validate(drawn(40, 4), np.arange(40), drawn(5, 5) + 40)
    assert strange is not None
    assert strange.shape == (5,)
    assert strange.min() > good.max()


@pytest.mark.parametrize("count", [10, 50])
def test_the_threshold_rejects_as_many_good_images_as_it_says(count: int) -> None:
    random, rejected = np.random.default_rng(count), []
    for _ in range(2000):
        distances = np.exp(random.normal(0.3, 0.1, count + 20))
        rejected.append(Judgement.of(distances[:count]).rejects(distances[count:]).mean())
    assert np.mean(rejected) == pytest.approx(FALSE_REJECTS, rel=0.2)


def test_at_the_threshold_strange_is_as_likely_as_not_and_at_the_mean_it_is_not() -> None:
    logarithms = np.random.default_rng(1).normal(0.3, 0.1, 30)
    found = Judgement.of(np.exp(logarithms))
    assert 1 / (1 + np.exp(-found.slope * (logarithms.mean() - found.threshold))) == pytest.approx(
        FALSE_REJECTS
    )
    assert found.rejects(
        np.exp(np.array([found.threshold + 1e-9, found.threshold - 1e-9]))
    ).tolist() == [True, False]
