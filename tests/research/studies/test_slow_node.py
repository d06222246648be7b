"""The study of a slow plant: what its federations do is what federations do."""

from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.messages import Spec
from research.studies.slow_node import DURATIONS, POLICIES, Federation
from tests.support.plants import CLASSES, draw, load_images
from trainer.data.class_folders import Images
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays

NODES = [str(index) for index in range(len(DURATIONS))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plants")
    return {name: draw(folder / name, 3, seed) for seed, name in enumerate(NODES)}


def begin(policy: str, folders: dict[str, Path]) -> tuple[Spec, Arrays, dict[str, Images]]:
    request = Request("fedavg", model="small", weights="none", size=32, rounds=50, seed=5, aggregate="mean")
    spec, first = draft(request, federation="slow", classes=CLASSES, nodes=len(NODES), participation=POLICIES[policy])
    return spec, first, {name: load_images(spec, folder) for name, folder in folders.items()}


@pytest.mark.slow
def test_rounds_that_wait_for_all_plants_give_the_bytes_of_a_simulated_federation(folders: dict[str, Path]) -> None:
    spec, first, images = begin("waiting", folders)
    federation = Federation(spec, first, images)
    federation.run(2 * max(DURATIONS) + 0.5)
    assert federation.closed == 2
    expected = simulate(msgspec.structs.replace(spec, rounds=2), first, images).broadcast
    assert {name: value.tobytes() for name, value in federation.broadcast.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


@pytest.mark.parametrize(("policy", "counted"), [("deadline", 0), ("asynchronous", 1)])
def test_a_slow_plant_s_contribution_counts_only_where_late_ones_do(
    policy: str, counted: int, folders: dict[str, Path]
) -> None:
    federation = Federation(*begin(policy, folders))
    federation.run(max(DURATIONS) + 2)
    assert federation.counted[NODES[-1]] == counted
    assert federation.closed >= 6
