"""The bridge from a region's broker to the one above: what it is made of, and two brokers that it connects."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError
from broker_config.security.access_list import rights
from broker_config.security.bridge import configuration, of_kit
from tests.support import provisioned_federation
from tests.support.plants import CLASSES, FEDERATION, Process, draw, drawn_weights, start, wait_for
from tests.support.ports import free_port
from tests.support.provisioned_federation import Guarded, Members
from tests.support.tree import SETTINGS, left_by, simulate_flat


def above(folder: Path) -> Members:
    """Federation tree, of which north is a relay."""
    return provisioned_federation.make(folder / "tree", "tree", ("north", "plant-c"), port=free_port())


def below(folder: Path, tree: Members) -> Members:
    """Its region, with a bridge."""
    made = provisioned_federation.make(
        folder / "north-plants", "north-plants", ("plant-a", "plant-b"), port=free_port()
    )
    return made.change(bridge=of_kit(tree.kits["north"]))


# What it is made of


def test_it_carries_what_a_node_says_and_hears_and_nothing_of_anybody_else(tmp_path: Path) -> None:
    """A node's own topics, but for those of vertical learning; blobs go at QoS 0, as clients send them."""
    written = configuration(of_kit(above(tmp_path).kits["north"]), "/etc/edge-node/broker")
    carried = {topic: (way, int(qos)) for topic, way, qos in re.findall(r"^topic (\S+) (\w+) (\d)$", written, re.M)}
    node = rights("north", "tree")
    assert carried.keys() == {topic for topic in (*node.writes, *node.reads) if "/vfl/" not in topic}
    assert {topic for topic, (way, _) in carried.items() if way == "both"} == set(node.writes) & set(node.reads)
    assert {topic for topic, (way, _) in carried.items() if way == "in"} <= set(node.reads) - set(node.writes)
    assert {topic for topic, (_, qos) in carried.items() if qos == 0} == {each for each in carried if "/blobs/" in each}


@pytest.mark.parametrize("member", ["coordinator", "monitor"])
def test_who_is_no_node_above_has_no_bridge(member: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"this kit is that of {member}"):
        of_kit(above(tmp_path).kits[member])


def test_a_broker_behind_a_web_proxy_has_no_bridge(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no bridge to wss://broker\.local/mqtt"):
        of_kit(replace(above(tmp_path).kits["north"], broker="wss://broker.local/mqtt"))


def test_it_stays_over_further_runs_and_its_key_is_the_owner_s_alone(tmp_path: Path) -> None:
    tree = above(tmp_path)
    region = below(tmp_path, tree).change(nodes=["plant-d"])
    assert region.registry.bridge == of_kit(tree.kits["north"])
    broker = region.folder / "broker"
    assert "\nconnection tree\n" in (broker / "mosquitto.conf").read_text()
    assert (broker / "bridge.pem").read_text() == tree.kits["north"].certificate
    assert (broker / "bridge.key").read_text() == tree.kits["north"].key
    assert (broker / "bridge.key").stat().st_mode & 0o777 == 0o600
    (broker / "bridge.key").unlink()
    assert region.change().folder.joinpath("broker/bridge.key").exists()


def test_the_region_s_coordinator_is_the_relay_s_node_above_and_its_nodes_are_not(tmp_path: Path) -> None:
    acl = (below(tmp_path, above(tmp_path)).folder / "broker" / "acl").read_text()
    sections = {section.splitlines()[0]: section for section in acl.split("\n\n")}
    assert "topic write edge-node/v1/tree/nodes/north/up" in sections["user coordinator"]
    assert [head for head, section in sections.items() if "/tree/" in section] == ["user coordinator"]
    assert "/tree/vfl/" not in acl


# Two brokers


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the user mosquitto may enter; pytest's are closed to him."""
    with tempfile.TemporaryDirectory() as passable:
        Path(passable).chmod(0o711)
        yield Path(passable)


def run(folder: Path, brokers: tuple[Guarded, Guarded], rounds: int) -> tuple[dict[str, Process], dict[str, Path]]:
    """Start all processes of the tree; north speaks with its region's broker alone."""
    (tree, region), processes = brokers, dict[str, Process]()
    plants = {
        name: draw(folder / "images" / name, 10, seed) for seed, name in enumerate(("plant-a", "plant-b", "plant-c"))
    }
    more = {
        "coordinator": (tree, ["coordinate", "--classes", ",".join(CLASSES), *FEDERATION, "--rounds", rounds,
                               "--weights", drawn_weights(), "--region", "north=2"]),
        "north": (tree, ["relay", "--region-kit", region.folder / "kits/coordinator.kit", "--bridged", "--nodes", 2]),
        **{name: (region if name != "plant-c" else tree, ["join", "--data", plants[name]]) for name in plants},
    }  # fmt: skip
    for name, (broker, words) in more.items():
        processes[name] = start(
            *words, "--kit", broker.folder / f"kits/{name}.kit", "--state", folder / name, log=folder / f"{name}.log",
            EDGE_NODE_PASSPHRASE=broker.members.passphrase(name),
            EDGE_NODE_REGION_PASSPHRASE=region.members.passphrase("coordinator"),
        )  # fmt: skip
    return processes, plants


def end(processes: dict[str, Process], folder: Path) -> None:
    try:
        codes = {name: process.wait(120) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    assert set(codes.values()) == {0}, "\n".join((folder / f"{name}.log").read_text() for name in processes)


@pytest.fixture
def brokers(folder: Path) -> Iterator[tuple[Guarded, Guarded]]:
    """The one above, and that of the region, with the configurations that provision has written."""
    tree = above(folder)
    both = Guarded(tree), Guarded(below(folder, tree))
    try:
        for each in both:
            each.start()
        yield both
    finally:
        for each in both:
            each.stop()


@pytest.mark.slow
def test_a_relay_that_knows_its_region_s_broker_alone_comes_to_the_bytes_of_one_coordinator(
    folder: Path, brokers: tuple[Guarded, Guarded]
) -> None:
    """Two signed federations, TLS and client certificates on all ways, the bridge's too."""
    processes, plants = run(folder, brokers, rounds=2)
    end(processes, folder)
    assert left_by(folder) == simulate_flat(plants)
    said = brokers[0].log.read_text()
    assert re.search(r"connected from \S+ as edge-node/tree/north/bridge\S* \(.*u'north'\)", said)
    assert not re.search(r"connected from \S+ as edge-node/tree/north/(?!bridge)", said)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["above", "below"])
def test_a_broker_on_either_side_that_is_started_again_costs_no_byte(
    which: int, folder: Path, brokers: tuple[Guarded, Guarded]
) -> None:
    processes, plants = run(folder, brokers, rounds=6)
    wait_for(folder / "coordinator.log", "round 2 closed")
    brokers[which].restart()
    end(processes, folder)
    assert left_by(folder) == simulate_flat(plants, SETTINGS._replace(rounds=6))
