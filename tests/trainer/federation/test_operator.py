"""Operators who pause, resume, drop and abort, over a real broker: what becomes of rounds, nodes and bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError
from tests.support.plants import draw
from tests.support.threaded_federation import PLANTS, Federation, same
from trainer import progress
from trainer.federation.server.coordinator import Outcome
from trainer.federation.server.journal import runs
from trainer.federation.server.operator_actions import Kind, act, make_action
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plants")
    return {name: draw(folder / name, 8, seed) for seed, name in enumerate(PLANTS)}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield Endpoint.parse(running.url)


def want(federation: Federation, what: Kind, node: str | None = None) -> None:
    folder = federation.folder / "coordinator"
    act(folder, make_action(federation.spec.run, what, "anna", node))


@pytest.mark.slow
def test_a_paused_federation_stays_paused_over_a_restart_and_then_comes_to_the_same_bytes(
    broker: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(broker, plants, tmp_path, "paused", 2, Participation())
    coordinator = federation.coordinator()
    nodes = [federation.node(name) for name in PLANTS]
    coordinator.wait_for(progress.RoundOpened)
    want(federation, "pause")
    for _ in nodes:
        coordinator.wait_for(progress.Contribution)
    assert coordinator.stop() is None
    again = federation.coordinator()
    again.wait_for(progress.Note(text="its operator has paused this run: no round opens or closes"))
    for _ in nodes:
        again.wait_for(progress.NodeJoined)
    assert federation.contributors() == []  # no round is closed
    want(federation, "resume")
    outcome = again.end()
    for node in nodes:
        node.end()
    simulated = simulate(federation.spec, federation.first, {name: federation.images(name) for name in PLANTS})
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)


@pytest.mark.slow
def test_the_others_go_on_without_a_dropped_node_and_it_stays_dropped(
    broker: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(broker, plants, tmp_path, "dropped", 2, Participation())
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    for _ in nodes:
        coordinator.wait_for(progress.NodeJoined)
    want(federation, "drop", PLANTS[2])
    with pytest.raises(EdgeNodeError, match="anna has dropped it from this run"):
        nodes[PLANTS[2]].end()
    coordinator.wait_for(progress.RoundClosed)
    assert coordinator.stop() is None
    again = federation.coordinator()
    with pytest.raises(EdgeNodeError, match="dropped it from this run"):
        federation.node(PLANTS[2]).end()
    assert isinstance(again.end(), Outcome)
    for name in PLANTS[:2]:
        nodes[name].end()
    assert federation.contributors()[-1] == {*PLANTS[:2]}


def test_an_abort_ends_the_run_for_all_and_the_journal_knows(
    broker: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(broker, plants, tmp_path, "aborted", 50, Participation())
    coordinator = federation.coordinator()
    node = federation.node(PLANTS[0])
    coordinator.wait_for(progress.NodeJoined)
    want(federation, "abort")
    with pytest.raises(EdgeNodeError, match="anna has aborted the run"):
        coordinator.end()
    with pytest.raises(EdgeNodeError, match="anna has ended it"):
        node.end()
    assert [record.outcome for record in runs(federation.folder / "coordinator")] == ["aborted"]


def test_a_run_whose_coordinator_died_between_the_abort_and_its_effect_is_aborted_when_it_is_started_again(
    broker: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(broker, plants, tmp_path, "aborted-later", 50, Participation())
    assert federation.coordinator().stop() is None
    want(federation, "abort")
    with pytest.raises(EdgeNodeError, match="anna has aborted the run"):
        federation.coordinator().end()


def test_a_node_is_not_dropped_if_too_few_would_be_left(
    broker: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(broker, plants, tmp_path, "too-few", 1, Participation())
    coordinator = federation.coordinator()
    for name in PLANTS:
        want(federation, "drop", name)
    coordinator.wait_for(progress.Note(text="plant-c cannot be dropped: too few nodes would be left"))
    node = federation.node(PLANTS[2])  # the last one cannot be dropped, and is a federation
    assert isinstance(coordinator.end(), Outcome)
    node.end()
