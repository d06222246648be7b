"""Operators who pause, resume, drop and abort, over a real broker: what becomes of rounds,
nodes and bytes.
"""

import json
from pathlib import Path

import pytest

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError
from tests.support.plants import (
    CLASSES,
    FEDERATION,
    Process,
    drawn_weights,
    here,
    start,
    wait_for,
)
from tests.support.threaded_federation import PLANTS, Federation, same
from trainer import progress
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.journal import runs
from trainer.federation.server.operator_actions import Kind, act, make_action
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate


def want(federation: Federation, what: Kind, node: str | None = None) -> None:
    folder = federation.folder / "coordinator"
    act(folder, make_action(federation.spec.run, what, "anna", node))


@pytest.mark.slow
def test_a_paused_federation_stays_paused_over_a_restart_and_then_comes_to_the_same_bytes(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "paused", 2, Participation())
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
    simulated = simulate(
        federation.spec, federation.first, {name: federation.images(name) for name in PLANTS}
    )
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)


@pytest.mark.slow
def test_the_others_go_on_without_a_dropped_node_and_it_stays_dropped(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "dropped", 2, Participation())
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    for _ in nodes:
        coordinator.wait_for(progress.NodeJoined)
    want(federation, "drop", PLANTS[2])
    with pytest.raises(EdgeNodeError, match=r"anna.*dropped"):
        nodes[PLANTS[2]].end()
    coordinator.wait_for(progress.RoundClosed)
    assert coordinator.stop() is None
    again = federation.coordinator()
    with pytest.raises(EdgeNodeError, match=r"dropped|ended before"):  # whichever comes first
        federation.node(PLANTS[2]).end()
    assert isinstance(again.end(), Outcome)
    for name in PLANTS[:2]:
        nodes[name].end()
    assert federation.contributors()[-1] == {*PLANTS[:2]}


def test_an_abort_ends_the_run_for_all_and_the_journal_knows(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "aborted", 50, Participation())
    coordinator = federation.coordinator()
    node = federation.node(PLANTS[0])
    coordinator.wait_for(progress.NodeJoined)
    want(federation, "abort")
    with pytest.raises(EdgeNodeError, match=r"anna.*aborted"):
        coordinator.end()
    with pytest.raises(EdgeNodeError, match=r"anna.*ended"):
        node.end()
    assert [record.outcome for record in runs(federation.folder / "coordinator")] == ["aborted"]


def test_a_run_whose_coordinator_died_before_an_aborts_effect_is_aborted_when_started_again(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "aborted-later", 50, Participation())
    assert federation.coordinator().stop() is None
    want(federation, "abort")
    with pytest.raises(EdgeNodeError, match=r"anna.*aborted"):
        federation.coordinator().end()


def test_a_node_is_not_dropped_if_too_few_would_be_left(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "too-few", 1, Participation())
    coordinator = federation.coordinator()
    for name in PLANTS:
        want(federation, "drop", name)
    coordinator.wait_for(
        progress.Note(text="plant-c cannot be dropped: too few nodes would be left")
    )
    node = federation.node(PLANTS[2])  # the last one cannot be dropped, and is a federation
    assert isinstance(coordinator.end(), Outcome)
    node.end()


# The same by commands


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "coordinator"


def coordinate(broker: Endpoint, federation: str, state: Path) -> Process:
    """A coordinator's process that waits for two nodes; its log lies beside its folder."""
    log = state.with_suffix(".log")
    process = start(
        "coordinate",
        f"mqtt://{broker.host}:{broker.port}",
        "--federation",
        federation,
        "--nodes",
        2,
        *FEDERATION,
        "--classes",
        ",".join(CLASSES),
        "--weights",
        drawn_weights(),
        "--state",
        state,
        log=log,
    )
    wait_for(log, "waiting for 2 nodes")
    return process


def refused(*command: object) -> str:
    done = here(*command)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_commands_pause_resume_and_abort_what_a_process_coordinates(
    endpoint: Endpoint, state: Path
) -> None:
    process, log = coordinate(endpoint, "typed", state), state.with_suffix(".log")
    try:
        action = json.loads(here("pause", "--state", state, "--json").stdout)
        assert (action["what"], action["node"]) == ("pause", None)
        wait_for(log, f"{action['by']} has paused the federation")
        assert "to resume the run" in here("resume", "--state", state).stdout
        wait_for(log, f"{action['by']} has resumed the federation")
        assert "no node 'plant-9'" in refused("drop", "plant-9", "--state", state)
        assert here("abort", "--state", state, "--reason", "the steel is sold out").returncode == 0
        assert process.wait(60) == 1
    finally:
        process.kill()
    told = here(
        "status",
        f"mqtt://{endpoint.host}:{endpoint.port}",
        "--federation",
        "typed",
        "--once",
        "--json",
    ).stdout
    assert json.loads(told)["reason"] == "the steel is sold out"
    assert "this run is aborted" in refused("pause", "--state", state)


def test_a_command_says_where_nobody_is_there_to_do_it(endpoint: Endpoint, state: Path) -> None:
    process = coordinate(endpoint, "alone", state)
    process.terminate()
    assert process.wait(60) == 130
    for command in (("pause",), ("resume",), ("drop", "plant-a")):
        assert "nobody coordinates" in refused(*command, "--state", state)
    # nobody else would tell the nodes
    assert "broker's address" in refused("abort", "--state", state)
    assert "no journal" in refused("pause", "--state", state.with_name("elsewhere"))


@pytest.mark.slow
def test_a_command_drops_a_node_but_not_the_last(
    endpoint: Endpoint, plants: dict[str, Path], state: Path
) -> None:
    url = f"mqtt://{endpoint.host}:{endpoint.port}"
    processes, log = (
        {"coordinator": coordinate(endpoint, "fewer", state)},
        state.with_suffix(".log"),
    )
    try:
        for name in PLANTS[:2]:
            processes[name] = start(
                "join",
                url,
                "--federation",
                "fewer",
                "--name",
                name,
                "--data",
                plants[name],
                "--state",
                state.with_name(name),
                log=state.with_name(f"{name}.log"),
            )
        for name in PLANTS[:2]:
            wait_for(log, f"{name} joined")
        # so that the run is not over before the last command
        assert here("pause", "--state", state).returncode == 0
        assert here("drop", PLANTS[1], "--state", state).returncode == 0
        assert processes[PLANTS[1]].wait(60) == 1
        assert "dropped it" in state.with_name(f"{PLANTS[1]}.log").read_text()
        assert "too few nodes" in refused("drop", PLANTS[0], "--state", state)
        assert here("resume", "--state", state).returncode == 0
        assert [processes[name].wait(120) for name in ("coordinator", PLANTS[0])] == [0, 0], (
            log.read_text()
        )
    finally:
        for process in processes.values():
            process.kill()
