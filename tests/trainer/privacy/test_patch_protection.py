"""What a node does to its patches before they leave: mixing, noise, levels."""

import msgspec
import numpy as np
import pytest

from broker_config.protocol.errors import UsageError
from trainer.privacy.patch_protection import (
    RANGE,
    ChannelStatistics,
    Floats,
    Protection,
    draw_mixtures,
    measure_channels,
    protect,
)
from trainer.seeding import generator

SEEDS = (0, 1, 2)


def patches(seed: int, mix: int = 1) -> tuple[Floats, ChannelStatistics]:
    """[500, mix, C, m, m] with channels of very different deviations, and their measure."""
    deviation = np.array([0.1, 1, 30], np.float32)
    mean = np.array([5, 0, -40], np.float32)
    values = (
        generator(seed, "patches").standard_normal((500, mix, 3, 2, 2)) * deviation[:, None, None]
    )
    return (values + mean[:, None, None]).astype(np.float32), ChannelStatistics(mean, deviation)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_protection_patches_leave_as_they_are(seed: int) -> None:
    values, measure = patches(seed)
    np.testing.assert_array_equal(
        protect(values, measure, Protection(), generator(seed)), values[:, 0]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_measured_in_standard_deviations_of_each_channel(seed: int) -> None:
    values, measure = patches(seed)
    added = protect(values, measure, Protection(noise=0.5), generator(seed)) - values[:, 0]
    np.testing.assert_allclose(added.std((0, 2, 3)) / measure.deviation, 0.5, rtol=0.1)
    np.testing.assert_allclose(added.mean((0, 2, 3)) / measure.deviation, 0, atol=0.05)


def test_the_same_generator_gives_the_same_noise_and_another_one_other_noise() -> None:
    values, measure = patches(0)
    first, same, other = (
        protect(values, measure, Protection(noise=1), generator(seed)) for seed in (1, 1, 2)
    )
    assert (first == same).all()
    assert (first != other).all()


@pytest.mark.parametrize("levels", [2, 3, 16])
def test_a_value_becomes_the_nearest_of_evenly_spread_levels_or_the_last_one_within_the_range(
    levels: int,
) -> None:
    values, measure = patches(3)
    sent = protect(values, measure, Protection(levels=levels), generator(0))
    for channel, (mean, deviation) in enumerate(zip(*measure, strict=True)):
        step = 2 * RANGE * deviation / (levels - 1)
        assert len(np.unique(sent[:, channel])) <= levels
        inside = np.clip(values[:, 0, channel], mean - RANGE * deviation, mean + RANGE * deviation)
        assert np.abs(sent[:, channel] - inside).max() <= step / 2 + 1e-4 * deviation


def test_levels_are_those_of_the_noisy_value_so_that_no_value_tells_more() -> None:
    values, measure = patches(4)
    sent = protect(values, measure, Protection(noise=0.3, levels=4), generator(0))
    assert max(len(np.unique(sent[:, channel])) for channel in range(3)) <= 4


@pytest.mark.parametrize("mix", [2, 5])
def test_a_mixed_patch_is_the_mean_of_its_images_patches(mix: int) -> None:
    values, measure = patches(5, mix)
    sent = protect(values, measure, Protection(mix=mix), generator(0))
    np.testing.assert_allclose(sent, values.mean(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mix", [1, 3])
def test_the_images_of_a_mixture_are_different_ones_of_one_label(mix: int, seed: int) -> None:
    labels = generator(seed, "labels").integers(0, 4, 60)
    rows = draw_mixtures(labels, 200, mix, generator(seed))
    assert rows.shape == (200, mix)
    assert all(len({*row}) == mix and len({*labels[row]}) == 1 for row in rows)
    assert {*labels[rows[:, 0]]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("given", "demanded", "unmet"),
    [
        ({}, {}, ""),
        ({"noise": 0.5, "levels": 4, "mix": 3}, {"noise": "0.5", "levels": "4", "mix": "3"}, ""),
        ({"levels": 4}, {"levels": "8", "mix": "1"}, ""),
        ({"levels": 16}, {"levels": "8"}, "levels=8 or fewer"),
        ({}, {"levels": "8"}, "levels=8 or fewer"),
        (
            {"mix": 2, "noise": 1.0},
            {"noise": "1.5", "mix": "3"},
            "mix=3 or more, noise=1.5 or more",
        ),
    ],
)
def test_what_a_node_demands_is_met_by_as_much_or_more(
    given: dict[str, float], demanded: dict[str, str], unmet: str
) -> None:
    assert Protection(**given).unmet_demands(demanded) == unmet  # type: ignore[arg-type]


@pytest.mark.parametrize("demanded", [{"nois": "1"}, {"noise": "much"}, {"mix": "0"}])
def test_a_demand_that_means_nothing_is_refused(demanded: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="cannot be met") as refused:
        Protection().unmet_demands(demanded)
    assert "noise=S, levels=N or mix=N" in refused.value.remedy


def test_a_label_with_too_few_images_to_mix_is_never_sent() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2])
    assert {*labels[draw_mixtures(labels, 50, 3, generator(0))].ravel()} == {0}
    assert draw_mixtures(labels, 50, 4, generator(0)).shape == (0, 4)


def test_the_measure_of_maps_is_each_channels() -> None:
    maps = generator(0, "maps").normal(2, 3, (8, 4, 6, 6)).astype(np.float32)
    mean, deviation = measure_channels(maps)
    np.testing.assert_allclose(mean, [maps[:, c].mean() for c in range(4)], rtol=1e-5)
    np.testing.assert_allclose(deviation, [maps[:, c].std() for c in range(4)], rtol=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"noise": -0.1}, {"levels": -2}, {"mix": 0}, {"noise": 1, "nois": 1}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Protection)


def test_a_single_level_is_refused() -> None:
    with pytest.raises(UsageError, match="one level"):
        Protection(levels=1)
