"""Noise on the way from a sensor to the head."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.channel_noise import Array, measure_extent, parse_channel, transmit
from edge_node.extensions.vfl.messages import Channel
from trainer.privacy.noise import quantise


def embedding(seed: int = 0, products: int = 400, size: int = 28) -> Array:
    return np.maximum(0, np.random.default_rng(seed).normal(1, 2, (products, size))).astype(
        np.float32
    )


def through(channel: Channel, values: Array, seed: int = 1) -> Array:
    return transmit(channel, values, np.random.default_rng(seed), measure_extent(values))


def test_a_clean_channel_changes_nothing() -> None:
    assert np.array_equal(through(Channel(), embedding()), embedding())


@pytest.mark.parametrize("levels", [2, 3, 5, 16, 256, 65536])
def test_a_quantiser_gives_the_nearest_of_its_levels_in_every_column(levels: int) -> None:
    values = embedding(size=1).astype(np.float64)
    grid = np.linspace(values.min(), values.max(), levels)
    received = quantise(values, levels, values.min(0), values.max(0))
    assert np.array_equal(
        through(Channel(levels=levels), embedding(size=1)), received.astype(np.float32)
    )
    beside = through(
        Channel(levels=levels), np.concatenate([values, -1000 * values], 1).astype(np.float32)
    )
    assert np.allclose(beside[:, :1], received)
    assert np.allclose(beside[:, 1:], -1000 * received, atol=1010 * (grid[1] - grid[0]))
    nearest = np.abs(values[..., None] - grid).min(-1) if levels < 300 else (grid[1] - grid[0]) / 2
    assert np.all(np.abs(received - values) <= nearest + 1e-9)
    assert {received.min(), received.max()} == {grid[0], grid[-1]}
    assert len(np.unique(received)) <= levels


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.integers(2, 300),
    st.booleans(),
)
def test_a_quantiser_stays_in_range_whatever_the_range(
    values: list[float], levels: int, dither: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no overflow either
        received = through(Channel(levels=levels, dither=dither), np.array([values], np.float32).T)
    assert received.dtype == np.float32
    assert np.isfinite(received).all()
    assert np.float32(min(values)) <= received.min()
    assert received.max() <= np.float32(max(values))


@pytest.mark.parametrize("channel", [Channel(levels=3), Channel(levels=3, dither=True)])
@pytest.mark.parametrize("value", [0.0, -7.25, 1e30])
def test_a_constant_message_passes_a_quantiser_as_it_is(channel: Channel, value: float) -> None:
    values = np.full((5, 4), value, np.float32)
    assert np.array_equal(through(channel, values), values)


def test_an_empty_message_passes() -> None:
    random, measure = np.random.default_rng(0), measure_extent(embedding(size=4))
    assert transmit(
        Channel(levels=3, loss=0.5), np.zeros((0, 4), np.float32), random, measure
    ).shape == (0, 4)


def test_one_product_is_quantised_as_it_would_be_among_those_of_its_sensors_round() -> None:
    values, channel = embedding(), Channel(levels=3)
    measure, together = measure_extent(values), through(channel, values)
    alone = [transmit(channel, row[None], np.random.default_rng(0), measure) for row in values]
    assert np.array_equal(np.concatenate(alone), together)
    beyond = transmit(channel, values * 100 - 7, np.random.default_rng(0), measure)
    assert (beyond.min(), beyond.max()) == (together.min(), together.max())


def test_dither_makes_the_quantisers_error_vanish_in_the_mean_which_it_does_not_otherwise() -> None:
    values, random = embedding(products=20), np.random.default_rng(0)
    step = np.ptp(values) / 2
    copies = [
        transmit(Channel(levels=3, dither=True), values, random, measure_extent(values))
        for _ in range(2000)
    ]
    assert np.abs(np.mean(copies, 0) - values).max() < 5 * step / 2 / np.sqrt(2000)
    assert np.abs(through(Channel(levels=3), values) - values).max() > step / 3
    assert {len(np.unique(column)) for copy in copies for column in copy.T} <= {2, 3}


def test_gaussian_noise_is_as_strong_as_asked_in_standard_deviations_of_the_message() -> None:
    noise = through(Channel(sigma=0.5), embedding()) - embedding()
    assert noise.std() == pytest.approx(0.5 * embedding().std(), rel=0.02)
    assert abs(noise.mean()) < 0.02


def test_what_is_lost_arrives_as_zeros_and_the_rest_as_it_is() -> None:
    values = embedding(products=4000) + 1
    received = through(Channel(loss=0.3), values)
    lost = ~received.any(1)
    assert lost.mean() == pytest.approx(0.3, abs=0.03)
    assert np.array_equal(received[~lost], values[~lost])


def test_noise_follows_from_the_generator_alone() -> None:
    channel = Channel(levels=3, dither=True, sigma=0.1, loss=0.1)
    assert np.array_equal(through(channel, embedding(), 1), through(channel, embedding(), 1))
    assert not np.array_equal(through(channel, embedding(), 1), through(channel, embedding(), 2))


@pytest.mark.parametrize(
    ("text", "channel"),
    [
        ("clean", Channel()),
        ("levels=3", Channel(levels=3)),
        ("levels=16,dither", Channel(levels=16, dither=True)),
        ("loss=0.1,sigma=0.2", Channel(loss=0.1, sigma=0.2)),
    ],
)
def test_people_can_write_a_channel(text: str, channel: Channel) -> None:
    assert parse_channel(text) == channel


@pytest.mark.parametrize(
    "text",
    [
        "",
        "noisy",
        "levels",
        "levels=1",
        "levels=2.5",
        "levels=1e9",
        "sigma=nan",
        "sigma=inf",
        "sigma=-1",
        "loss=1",
        "dither",
        "levels=3;loss=0.1",
    ],
)
def test_what_is_no_channel_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_channel(text)
