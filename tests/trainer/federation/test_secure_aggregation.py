"""Secure aggregation over a broker: the open sum's bytes, and nobody sees what one node has contributed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from tests.support.authority import Authority
from tests.support.plants import draw
from tests.support.threaded_federation import PLANTS, Federation, end_all, same
from trainer.federation.server.coordinator import Outcome
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plants")
    return {name: draw(folder / name, 8, seed) for seed, name in enumerate(PLANTS)}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield Endpoint.parse(running.url)


def found(broker: Endpoint, plants: dict[str, Path], folder: Path, name: str, **options: object) -> Federation:
    """Found a federation whose contributions are masked."""
    settings = {"participation": Participation(), "weights": "images", "rounds": 2, **options}
    return Federation(
        broker, plants, folder, name, signers=Authority(name).signers(), encryption="group", secure_aggregation=True,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def test_masked_contributions_come_to_the_open_sum_bit_for_bit(
    broker: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = found(broker, plants, tmp_path, "whole")
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    end_all(sessions)
    outcome = sessions[0].end()
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)
    assert not same(outcome.broadcast, federation.first)
    assert all(same(federation.personal(name), to_arrays(simulated.models[name].tensors)) for name in PLANTS)
