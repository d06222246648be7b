"""State folders that were restored from a copy or damaged: it is named, and the run goes on,
to the same bytes.
"""

import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode_any
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Hello
from tests.support.mosquitto import Mosquitto
from tests.support.threaded_federation import PLANTS, Federation, Session, same
from trainer import progress
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays

ROUNDS = 4


@pytest.fixture
def federation(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Federation:
    return Federation(
        endpoint,
        plants,
        tmp_path,
        f"restored-{abs(hash(request.node.name))}",
        ROUNDS,
        Participation(),
    )


def closes(session: Session, round_: int) -> None:
    """Wait until the coordinator has closed a round."""
    closed = session.wait_for(progress.RoundClosed)
    while closed.round != round_:  # type: ignore[union-attr]
        closed = session.wait_for(progress.RoundClosed)


def has_ended(round_: int) -> Callable[[progress.AnyEvent], bool]:
    """Whether, with an event, a node's contribution to a round has been taken,
    and its stage 2 is on disk.
    """
    left: set[type] = {progress.Contribution, progress.Measured}

    def until(event: progress.AnyEvent) -> bool:
        if isinstance(event, progress.Contribution | progress.Measured) and event.round == round_:
            left.discard(type(event))
        return not left

    return until


def notes(*words: str, session: Session) -> str:
    """Wait for a note with all of these words."""
    while True:
        note = session.wait_for(progress.Note)
        assert isinstance(note, progress.Note)
        if all(word in note.text for word in words):
            return note.text


def backup(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-backup")))


def restore(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


def ends_as_undisturbed(
    federation: Federation, coordinator: Session, nodes: dict[str, Session]
) -> None:
    outcome = coordinator.end()
    for node in nodes.values():
        node.end()
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)
    assert all(
        same(federation.personal(name), to_arrays(simulated.models[name].tensors))
        for name in PLANTS
    )


@pytest.mark.slow
@pytest.mark.parametrize("nodes_stay", [True, False])
def test_nodes_go_back_with_a_coordinator_whose_state_is_an_older_copy(
    nodes_stay: bool, federation: Federation, tmp_path: Path
) -> None:
    """By two rounds: both sides say so, and the result is that of an undisturbed run."""
    state = tmp_path / "coordinator"
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    closes(coordinator, 1)
    assert coordinator.stop() is None
    copy = backup(state)
    coordinator = federation.coordinator()
    closes(coordinator, 3)
    assert coordinator.stop() is None
    if not nodes_stay:
        for node in nodes.values():
            node.stop()
    restore(copy, state)
    coordinator = federation.coordinator()
    if not nodes_stay:
        nodes = {name: federation.node(name) for name in PLANTS}
    assert f"{state} is in round 2" in notes("has been in round", "older copy", session=coordinator)
    notes("the coordinator is in round 2 again", session=nodes["plant-a"])
    ends_as_undisturbed(federation, coordinator, nodes)


@pytest.mark.slow
def test_a_coordinator_restored_after_its_nodes_finished_says_whom_it_needs_and_they_go_back(
    federation: Federation, tmp_path: Path
) -> None:
    state = tmp_path / "coordinator"
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    closes(coordinator, 2)
    assert coordinator.stop() is None
    copy = backup(state)
    coordinator = federation.coordinator()
    ends_as_undisturbed(federation, coordinator, nodes)
    restore(copy, state)
    with pytest.raises(EdgeNodeError, match="plant-a, plant-b, plant-c") as alone:
        federation.coordinator(linger=0.5).end()
    assert "join again" in alone.value.remedy
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    notes("the coordinator is in round 3 again", session=nodes["plant-a"])
    ends_as_undisturbed(federation, coordinator, nodes)


@pytest.mark.slow
def test_a_node_whose_state_is_an_older_copy_is_let_in_and_both_sides_say_so(
    federation: Federation, tmp_path: Path
) -> None:
    """Of two processes ago: fewer were counted in it than the coordinator has seen."""
    state = tmp_path / "plant-a"
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    closes(coordinator, 1)
    nodes["plant-a"].stop()
    copy = backup(state)
    for round_ in (2, 3):
        nodes["plant-a"] = federation.node("plant-a")
        closes(coordinator, round_)
        nodes["plant-a"].stop()
    newer = backup(state.rename(tmp_path / "newer"))
    shutil.copytree(copy, state)
    nodes["plant-a"] = federation.node("plant-a")
    told = notes("older copy", str(state), session=nodes["plant-a"])
    assert "newer folder" in told
    notes("plant-a has contributed to round", "older copy", session=coordinator)
    nodes["plant-a"].stop()
    restore(newer, state)
    nodes["plant-a"] = federation.node("plant-a")
    outcome = coordinator.end()
    assert isinstance(outcome, Outcome)
    for node in nodes.values():
        node.end()
    assert federation.contributors() == [{*PLANTS}] * ROUNDS


@pytest.mark.slow
def test_a_hello_that_the_broker_says_again_makes_nobodys_folder_an_older_copy(
    federation: Federation, endpoint: Endpoint
) -> None:
    """It tells of an earlier round than its node has contributed to since."""
    inbox: queue.Queue[Any] = queue.Queue()
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    closes(coordinator, 1)
    nodes["plant-a"].stop()
    with MqttClient(endpoint, "tester", inbox=inbox, persistent=False) as tester:
        tester.subscribe(topics.up(federation.spec.federation, "plant-a"))
        tester.await_subscription(60)
        nodes["plant-a"] = federation.node("plant-a")
        said: Any = None
        while not (isinstance(said, Delivery) and isinstance(decode_any(said.payload), Hello)):
            said = inbox.get(timeout=60)
        assert decode_any(said.payload).round > 0  # type: ignore[union-attr]
        closes(coordinator, 3)
        tester.publish(said.topic, said.payload)
        tester.flush(60)
        outcome = coordinator.end()
    assert isinstance(outcome, Outcome)
    for node in nodes.values():
        node.end()
    assert "older copy" not in str(coordinator.all_told())


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(each, marks=pytest.mark.slow)
        for each in ("state-*", "progress*.json", "identity.json", "blobs/*")
    ],
)
def test_a_node_with_damaged_files_goes_on_to_the_same_bytes(
    files: str, federation: Federation, tmp_path: Path
) -> None:
    """A bit of each newest one is flipped while the node is stopped after the second round,
    and others go on.
    """
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS[:2]}
    nodes["plant-c"] = federation.node("plant-c", until=has_ended(2))
    assert nodes["plant-c"].end() is None
    closes(coordinator, 2)
    found = sorted((tmp_path / "plant-c").glob(files), key=lambda path: path.stat().st_mtime)
    for path in [each for each in found if each.is_file()][-2 if files == "blobs/*" else -1 :]:
        damage(path)
    nodes["plant-c"] = federation.node("plant-c")
    ends_as_undisturbed(federation, coordinator, nodes)


def stopped_in_the_last_round(federation: Federation) -> dict[str, Session]:
    """The nodes, of which plant-b has yet to train the last round; plant-c has,
    and what it began with is damaged.
    """
    ends = {"plant-b": ROUNDS - 1, "plant-c": ROUNDS}
    nodes = {name: federation.node(name, until=has_ended(round_)) for name, round_ in ends.items()}
    nodes["plant-a"] = federation.node("plant-a")
    for name in ends:
        assert nodes[name].end() is None
    for path in (federation.folder / "plant-c" / "blobs").glob("?" * 64):
        damage(path)
    return nodes


@pytest.mark.slow
def test_a_node_that_finds_the_open_rounds_broadcast_damaged_fetches_it_again(
    federation: Federation,
) -> None:
    coordinator = federation.coordinator(linger=60)
    nodes = stopped_in_the_last_round(federation)
    nodes["plant-c"] = federation.node("plant-c")
    nodes["plant-c"].wait_for(progress.Received)
    nodes["plant-b"] = federation.node("plant-b")
    ends_as_undisturbed(federation, coordinator, nodes)


@pytest.mark.slow
def test_a_node_makes_its_model_with_the_result_where_the_last_rounds_broadcast_is_damaged_and_gone(
    federation: Federation,
) -> None:
    coordinator = federation.coordinator(linger=60)
    nodes = stopped_in_the_last_round(federation)
    nodes["plant-b"] = federation.node("plant-b")
    closes(coordinator, ROUNDS)
    nodes["plant-c"] = federation.node("plant-c")
    notes(
        "is damaged, and the coordinator has it no more",
        "result of the last round",
        session=nodes["plant-c"],
    )
    for session in (coordinator, *nodes.values()):
        session.end()
    assert federation.personal("plant-c").keys() == federation.personal("plant-a").keys()


@pytest.mark.slow
def test_a_contribution_that_was_damaged_at_the_coordinator_is_sent_again_by_a_node_that_never_left(
    federation: Federation, tmp_path: Path
) -> None:
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS[:2]}
    for _ in nodes:
        coordinator.wait_for(progress.NodeJoined)
    nodes["plant-c"] = federation.node(
        "plant-c", until=lambda event: isinstance(event, progress.Received)
    )
    for _ in range(2):
        coordinator.wait_for(progress.Contribution)
    nodes["plant-c"].end()
    assert coordinator.stop() is None
    newest = max(
        (tmp_path / "coordinator" / "blobs").glob("?" * 64), key=lambda path: path.stat().st_mtime
    )
    damage(newest)
    coordinator = federation.coordinator()
    notes("was damaged in", "it is fetched again", session=coordinator)
    nodes["plant-c"] = federation.node("plant-c")
    ends_as_undisturbed(federation, coordinator, nodes)


@pytest.mark.slow
def test_a_broker_whose_file_was_cut_off_starts_without_it_and_all_comes_back(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    broker = Mosquitto(tmp_path / "broker", persistence=True)
    broker.start()
    federation = Federation(
        Endpoint.parse(broker.url), plants, tmp_path, "cut", ROUNDS, Participation()
    )
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS[:2]}
    for _ in nodes:
        coordinator.wait_for(progress.NodeJoined)
    broker.wait_until_saved()
    broker.kill()
    file = broker.log.with_name("mosquitto.db")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    # mosquitto's, and no reason beside it
    with pytest.raises(AssertionError, match="Couldn't open database"):
        broker.start()
    file.unlink()
    broker.start()
    nodes["plant-c"] = federation.node("plant-c")
    ends_as_undisturbed(federation, coordinator, nodes)
    broker.end()
