"""A tree of aggregators: real processes over real brokers come to what one coordinator comes to, to the byte."""

from pathlib import Path

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from tests.support.chaos import verification
from tests.support.chaos.run import ChaosRun, Federation, prepare
from tests.support.chaos.schedule import draw_relays
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


@pytest.mark.slow
def test_a_relay_that_is_killed_around_each_of_its_durable_steps_loses_nothing_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    federation = Federation(rounds=4, nodes=4, seed=3, codec="int4", regions=2)
    plants = prepare(federation, tmp_path / "images")
    strikes = draw_relays(2950, federation.rounds, tuple(federation.relays))
    outcome = ChaosRun(federation, plants, tmp_path / "run", strikes=strikes).run()
    assert verification.complaints(tmp_path / "run", federation, verification.simulated(federation, plants)) == []
    assert verification.missed(strikes, outcome.kills) == []
