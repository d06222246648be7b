"""A tree of aggregators: real processes over real brokers come to what one coordinator comes to, to the byte."""

import shutil
from pathlib import Path

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from tests.support.chaos import verification
from tests.support.chaos.run import ChaosRun, Federation, prepare
from tests.support.chaos.schedule import draw_relays
from tests.support.plants import CLASSES, draw, here, run, wait_for
from tests.support.tree import SETTINGS, Tensors, Tree, simulate_flat
from tests.support.waiting import wait_until
from trainer.federation.server.journal import history

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


@pytest.mark.slow
def test_two_regions_and_a_plant_in_none_come_to_the_bytes_of_one_coordinator(
    known: Known, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    plants, expected = known
    regions = {"north": pick(plants, "a", "b"), "south": pick(plants, "c", "d")}
    with Tree(mosquitto.url, regions, pick(plants, "e"), tmp_path / "run") as tree:
        tree.start()
        tree.end()
    assert tree.left() == expected


@pytest.mark.slow
def test_a_relay_of_a_relay_forwards_what_that_one_forwards(
    known: Known, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    """Plants b and c are in region line, whose relay is a node of region north, as plant a is; d and e are in none."""
    plants, expected = known
    tree = Tree(mosquitto.url, {"north": pick(plants, "a", "b", "c")}, pick(plants, "d", "e"), tmp_path / "run")
    tree.commands["line"] = [
        "relay", mosquitto.url, "--federation", "north-plants", "--name", "line", "--region", "line-plants",
        "--nodes", 2,
    ]  # fmt: skip
    tree.commands["north"] = [*tree.commands["north"], "--nodes", 2, "--subregion", "line=2"]
    for name in ("plant-b", "plant-c"):
        tree.commands[name] = ["line-plants" if word == "north-plants" else word for word in tree.commands[name]]
    with tree:
        tree.start()
        tree.end()
    assert tree.left() == expected


@pytest.mark.slow
def test_totals_of_statistics_and_the_heads_made_of_them_are_those_of_one_coordinator(
    known: Known, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    plants = known[0]
    regions = {"north": pick(plants, "a", "b"), "south": pick(plants, "c", "d", "e")}
    flags = ("--method", "fedavg", "--head", "statistics")
    with Tree(mosquitto.url, regions, {}, tmp_path / "run", flags=flags) as tree:
        tree.start()
        tree.end()
    expected = simulate_flat(plants, SETTINGS._replace(method="fedavg", head="statistics"))
    assert any(name.startswith("global/statistics.") for name in expected)
    assert tree.left() == expected


@pytest.mark.slow
def test_a_region_ends_with_the_federation_above_and_its_nodes_hear_why(
    known: Known, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Tree(mosquitto.url, {"north": pick(known[0], "a", "b")}, {}, folder, flags=("--rounds", 1000)) as tree:
        tree.start()
        wait_for(folder / "north.log", "round 1 closed")
        assert here("abort", "--state", folder / "coordinator", "--reason", "it was a trial").returncode == 0
        codes = {name: process.wait(60) for name, process in tree.processes.items()}
    assert 0 not in codes.values()
    for name in ("north", "plant-a", "plant-b"):
        assert "it was a trial" in (folder / f"{name}.log").read_text(), name


@pytest.mark.slow
def test_a_coordinator_that_has_gone_back_below_what_a_region_has_forwarded_ends_its_relay(
    known: Known, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Tree(mosquitto.url, {"north": pick(known[0], "a", "b")}, {}, folder, flags=("--rounds", 1000)) as tree:
        tree.start()
        wait_for(folder / "coordinator.log", "round 1 closed")
        tree.kill("coordinator")
        shutil.copytree(folder / "coordinator", tmp_path / "older")
        tree.start("coordinator")
        wait_until(lambda: len(history(folder / "coordinator")) > 5)
        tree.kill("coordinator")
        shutil.rmtree(folder / "coordinator")
        shutil.copytree(tmp_path / "older", folder / "coordinator")
        tree.start("coordinator")
        assert "a region cannot go back with it" in wait_for(folder / "north.log", "What to do")


@pytest.mark.slow
def test_who_is_granted_no_region_is_told_so(mosquitto: EmbeddedBroker, tmp_path: Path) -> None:
    with Tree(mosquitto.url, {"north": dict.fromkeys("ab", tmp_path)}, {}, tmp_path / "run") as tree:
        tree.start("coordinator")
        for changed, said in (
            (("--name", "south"), "knows no relay 'south'"),
            (("--nodes", "3"), "north may stand for 2 nodes in federation 'tree', not for 3"),
        ):
            refused = run(*tree.commands["north"], *changed, "--state", tmp_path / "relay")
            assert refused.returncode == 2
            assert said in refused.stderr
            assert "edge-node coordinate --region" in refused.stderr


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
