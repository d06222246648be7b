"""Whatever is killed, whenever: the short version of `make chaos`, and what its own instruments see."""

from pathlib import Path

import pytest

from tests.chaos import evidence, schedule
from tests.chaos.campaign import Campaign, Federation, prepare

pytestmark = pytest.mark.slow

SMALL = Federation(rounds=4, nodes=3, seed=3)
Known = tuple[dict[str, Path], evidence.Tensors]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """The images of three plants, and what a federation of them must end with."""
    plants = prepare(SMALL, tmp_path_factory.mktemp("plants"))
    return plants, evidence.simulated(SMALL, plants)


@pytest.mark.parametrize(("seed", "persistence"), [(5, True), (8, False)])
def test_kills_at_random_moments_and_around_durable_steps_change_no_byte(
    seed: int, persistence: bool, known: Known, tmp_path: Path
) -> None:
    plants, expected = known
    strikes = schedule.draw(seed, 8, SMALL.rounds, SMALL.names)
    outcome = Campaign(SMALL, plants, tmp_path / "run", strikes=strikes, persistence=persistence).run()
    assert evidence.complaints(tmp_path / "run", SMALL, expected) == []
    assert evidence.missed(strikes, outcome.kills) == []
