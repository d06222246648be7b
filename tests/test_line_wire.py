"""A line over a real broker: what it learns is what a simulation learns, to the last bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_config.embedded import start_broker
from broker_config.vertical import Channel, Denoising, Recipe
from tests.lines import draw, in_threads, left, line_spec, simulated


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A mosquitto for lines one after the other."""
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield running.url


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (1, {}),
        (2, {"channel": Channel(levels=3), "denoising": Denoising(rounds=4)}),
        (3, {"labels": "server", "channel": Channel(sigma=0.3, loss=0.1), "recipe": Recipe(batches=7)}),
    ],
    ids=["plain", "noise and denoiser", "labels at the head"],
)
def test_a_line_over_a_broker_ends_with_the_same_bytes_as_the_simulation(
    seed: int, settings: dict[str, Any], broker: str, tmp_path: Path
) -> None:
    spec = line_spec(("press", "oven", "lamp"), seed=seed, **settings)
    draw(tmp_path / "data", 100, seed)
    in_threads(spec, broker, tmp_path / "data", tmp_path, rounds=7)
    assert left(spec, tmp_path, 7) == simulated(spec, tmp_path / "data", 7)
