"""Federations that wait for no slow node: late contributions count in the open round, over a real broker."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from tests.support.plants import CLASSES, FEDERATION, draw, drawn_weights, start, wait_for
from tests.support.threaded_federation import PLANTS, Federation
from trainer import progress
from trainer.federation.server.journal import settled
from trainer.federation.server.record_facts import RoundClosed
from trainer.federation.server.spec import Participation


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plants")
    return {name: draw(folder / name, 8, seed) for seed, name in enumerate(PLANTS)}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield running.url


def origins(coordinator: Path) -> list[dict[str, int]]:
    """For each closed round, the round that each contribution was trained for, by node."""
    facts = [each for each in settled(coordinator) if isinstance(each, RoundClosed)]
    return [{node: part.trained_from or each.round for node, part in each.contributions.items()} for each in facts]


def test_a_slow_node_delays_nobody_and_what_it_has_learnt_counts_all_the_same(
    url: str, plants: dict[str, Path], tmp_path: Path
) -> None:
    participation = Participation(quorum=2, staleness=200)
    broker = Endpoint.parse(url)
    federation = Federation(broker, plants, tmp_path, "asynchronous", 200, participation, "fedavg", codec="int4")
    coordinator = federation.coordinator()
    quick = [federation.node(name) for name in PLANTS[:2]]
    training = msgspec.structs.replace(federation.spec.training, local_epochs=10)
    federation.spec = msgspec.structs.replace(federation.spec, training=training)
    slow = federation.node(PLANTS[2])

    def late_one() -> progress.Contribution:
        while True:
            told = coordinator.wait_for(progress.Contribution)
            assert isinstance(told, progress.Contribution)
            if told.node == PLANTS[2] and told.behind:
                return told

    late, later = late_one(), late_one()
    coordinator.wait_for(progress.RoundClosed)
    for session in (slow, coordinator, *quick):
        session.stop()
    made_for = [late.round - late.behind, later.round - later.behind]
    assert made_for[1] > late.round  # it did not train for the round that holds it already
    counted = origins(federation.folder / "coordinator")
    assert [counted[each.round - 1][PLANTS[2]] for each in (late, later)] == made_for
    own = [each for each in slow.all_told() if isinstance(each, progress.Contribution | progress.Late)]
    assert [type(each) for each in own] == [progress.Contribution] * len(own)


@pytest.mark.slow
def test_a_coordinator_that_is_killed_counts_each_contribution_once_and_each_round_has_its_quorum(
    url: str, plants: dict[str, Path], tmp_path: Path
) -> None:
    """One plant has many times the images of the others."""
    images = {**plants, PLANTS[2]: draw(tmp_path / "images", 80, 3)}
    command = (
        "coordinate", url, "--federation", "killed", "--classes", ",".join(CLASSES), "--nodes", 3, *FEDERATION[:6],
        "--rounds", 10, "--seed", 7, "--quorum", 2, "--staleness", 4, "--weights", drawn_weights(),
        "--state", tmp_path / "coordinator",
    )  # fmt: skip
    processes = []
    try:
        for name, folder in images.items():
            join = ("join", url, "--federation", "killed", "--name", name, "--data", folder)
            processes.append(start(*join, "--state", tmp_path / name, log=tmp_path / f"{name}.log"))
        for closed in (2, 5, 7):
            log = tmp_path / f"coordinator-{closed}.log"
            coordinator = start(*command, log=log)
            processes.append(coordinator)
            wait_for(log, f"round {closed}", seconds=60)
            coordinator.send_signal(signal.SIGKILL)
            assert coordinator.wait(10) == -signal.SIGKILL
            processes.remove(coordinator)
        processes.append(start(*command, log=tmp_path / "coordinator.log"))
        assert [each.wait(100) for each in processes] == [0] * 4, (tmp_path / "coordinator.log").read_text()
    finally:
        for process in processes:
            process.kill()
    rounds = origins(tmp_path / "coordinator")
    assert len(rounds) == 10
    assert all(len(each) >= 2 for each in rounds)
    counted = Counter((node, origin) for each in rounds for node, origin in each.items())
    assert set(counted.values()) == {1}
    assert all(0 <= number - origin <= 4 for number, each in enumerate(rounds, 1) for origin in each.values())
