"""A tree of aggregators: real processes over real brokers come to what one coordinator comes to, to the byte."""

from pathlib import Path

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from tests.support.plants import CLASSES, draw
from tests.support.tree import Tensors, Tree, simulate_flat

NAMES = ("plant-a", "plant-b", "plant-c", "plant-d", "plant-e")
Known = tuple[dict[str, Path], Tensors]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Five plants with 20 or 30 images, and what they come to without a tree."""
    folder = tmp_path_factory.mktemp("plants")
    parts = (CLASSES, CLASSES[:2], CLASSES[1:], CLASSES, CLASSES[:2])
    plants = {name: draw(folder / name, 10, seed, parts[seed]) for seed, name in enumerate(NAMES)}
    return plants, simulate_flat(plants)


def pick(plants: dict[str, Path], *letters: str) -> dict[str, Path]:
    return {name: path for name, path in plants.items() if name[-1] in letters}


def test_two_regions_and_a_plant_in_none_come_to_the_bytes_of_one_coordinator(
    known: Known, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    plants, expected = known
    regions = {"north": pick(plants, "a", "b"), "south": pick(plants, "c", "d")}
    tree = Tree(mosquitto.url, regions, pick(plants, "e"), tmp_path / "run")
    tree.start()
    tree.end()
    assert tree.left() == expected
