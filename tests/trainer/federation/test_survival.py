"""Coordinator and nodes that are stopped, late or away, over a real broker;
here in threads, killed elsewhere.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from broker_config.mqtt.client import read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode, encode_tensors
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Manifest, Preprocessing, RoundState, Training
from broker_config.protocol.topics import COORDINATOR
from tests.support import class_sums
from tests.support.proxy import Proxy
from tests.support.threaded_federation import PATIENCE, PLANTS, Federation, same
from trainer import progress
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.federation.update_codec import encode_start
from trainer.methods import METHODS, Entry
from trainer.methods.base import Method
from trainer.models.named_tensors import Arrays
from trainer.models.network import to_arrays
from trainer.statistics.sums import PREFIX
from trainer.training.personal_model import load_metadata


@pytest.mark.slow
def test_a_sample_of_the_nodes_trains_each_round_with_the_same_bytes_as_in_the_simulation(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "sampled", 5, Participation(sample=2))
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
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
    assert [len(each) for each in federation.contributors()] == [2] * 5
    assert set.union(*federation.contributors()) == set(PLANTS)


@pytest.mark.parametrize(
    ("method", "rounds", "options"), [("afedcl", 3, {}), (class_sums.NAME, 1, {"trained": "1"})]
)
def test_a_coordinator_that_is_stopped_in_a_round_goes_on_in_it_and_nobody_trains_again(
    method: str,
    rounds: int,
    options: dict[str, str],
    endpoint: Endpoint,
    plants: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the second of three rounds of training,
    or in the one for statistics that follows a single one.
    """
    class_sums.register(monkeypatch)
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        f"stopped-{rounds}",
        rounds,
        Participation(),
        method,
        codec="int4",
        **options,
    )
    coordinator = federation.coordinator()
    early = [federation.node(name) for name in PLANTS[:2]]
    late = federation.node(PLANTS[2])
    coordinator.wait_for(progress.RoundClosed)
    late.stop()
    contributed = {coordinator.wait_for(progress.Contribution).node for _ in early}  # type: ignore[union-attr]
    assert coordinator.stop() is None
    again = federation.coordinator()
    late = federation.node(PLANTS[2])
    again.wait_for(progress.RoundClosed)
    assert {event.node for event in again.told if isinstance(event, progress.Contribution)} == {
        *PLANTS
    } - contributed
    outcome = again.end()
    for node in (*early, late):
        node.end()
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)
    assert all(
        same(federation.personal(name), to_arrays(simulated.models[name].tensors))
        for name in PLANTS
    )


@pytest.mark.parametrize(
    "away",
    [
        pytest.param(False, id="all along", marks=pytest.mark.slow),
        pytest.param(True, id="without its blobs"),
    ],
)
def test_rounds_travel_as_deltas_and_whoever_has_not_the_broadcast_before_fetches_the_next_in_full(
    away: bool, endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """In the second round a node comes back whose blobs are gone."""
    federation = Federation(
        endpoint, plants, tmp_path, f"deltas-{away}", 3, Participation(), "fedavg", codec="int4"
    )
    coordinator = federation.coordinator()
    others = [federation.node(name) for name in PLANTS[1:]]
    first = federation.node(
        PLANTS[0], until=lambda event: away and isinstance(event, progress.Contribution)
    )
    if away:
        assert first.end() is None
        shutil.rmtree(tmp_path / PLANTS[0] / "blobs")
        coordinator.wait_for(progress.RoundClosed)
        again = federation.node(PLANTS[0])
    outcome = coordinator.end()
    sessions = [*others, again if away else first]
    for node in sessions:
        node.end()
    received = [
        [e.bytes for e in node.all_told() if isinstance(e, progress.Received)] for node in sessions
    ]
    whole = len(encode_tensors(federation.first))
    start = len(encode_start(federation.spec, federation.first))
    assert [[size == start for size in sizes] for sizes in received[:2]] == [
        [True, False, False, False]
    ] * 2
    assert start < 0.6 * whole
    assert max(received[0][1:]) < whole / 5
    assert received[2].count(whole) == away
    simulated = simulate(
        federation.spec, federation.first, {name: federation.images(name) for name in PLANTS}
    )
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)


@pytest.mark.slow
@pytest.mark.parametrize("cut_off", [COORDINATOR, PLANTS[1]])
def test_who_is_cut_off_for_longer_than_the_keepalive_is_missed_and_all_go_on_to_the_same_bytes(
    cut_off: str, endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """A network that forwards nothing, and closes nothing: MQTT's keepalive
    (20 s) ends the connection at both ends.
    """
    with Proxy(endpoint.port) as proxy:
        ways = dict.fromkeys((COORDINATOR, *PLANTS), endpoint) | {
            cut_off: Endpoint.parse(proxy.url)
        }
        federation = Federation(ways, plants, tmp_path, f"cut-{cut_off}", 6, Participation())
        coordinator = federation.coordinator()
        nodes = {name: federation.node(name) for name in PLANTS}
        coordinator.wait_for(progress.RoundClosed)
        proxy.flows.clear()
        if cut_off == COORDINATOR:
            nodes[PLANTS[0]].wait_for(
                progress.Note(text="the coordinator is not connected; waiting for it")
            )
        else:
            coordinator.wait_for(progress.NodeLost)
        proxy.flows.set()
        if cut_off == COORDINATOR:
            nodes[PLANTS[0]].wait_for(progress.Note(text="the coordinator is back; going on"))
        outcome = coordinator.end()
        for node in nodes.values():
            node.end()
    images = {name: federation.images(name) for name in PLANTS}
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulate(federation.spec, federation.first, images).broadcast)


def test_a_node_that_was_away_in_the_round_for_statistics_has_the_model_that_it_would_have_had(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """Two rounds, the second one for statistics, which two nodes may close."""
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        "away",
        1,
        Participation(quorum=2),
        "fedavg",
        head="statistics",
    )
    coordinator = federation.coordinator(linger=PATIENCE)
    with federation.opened_by(3, coordinator):
        leaving = federation.node(
            PLANTS[2], until=lambda event: isinstance(event, progress.Contribution)
        )
        nodes = {name: federation.node(name) for name in PLANTS[:2]}
    assert leaving.end() is None
    for _ in (1, 2):
        coordinator.wait_for(progress.RoundClosed)
    nodes[PLANTS[2]] = federation.node(PLANTS[2])
    outcome = coordinator.end()
    for node in nodes.values():
        node.end()
    simulated = simulate(
        federation.spec, federation.first, {n: federation.images(n) for n in PLANTS}, compare=True
    )
    assert federation.contributors() == [{*PLANTS}, {*PLANTS[:2]}]
    assert isinstance(outcome, Outcome)
    images = f"{PREFIX}.images"
    assert outcome.broadcast[images].sum() < simulated.broadcast[images].sum()
    agree = {
        name: same(federation.personal(name), to_arrays(simulated.models[name].tensors))
        for name in PLANTS
    }
    assert agree == {PLANTS[0]: False, PLANTS[1]: False, PLANTS[2]: True}


def test_a_node_that_knows_whether_it_counted_needs_no_coordinator_for_its_model(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped as it begins to make its model,
    and comes back when the coordinator has gone for good.
    """
    federation = Federation(
        endpoint, plants, tmp_path, "alone", 1, Participation(), class_sums.register(monkeypatch)
    )
    coordinator = federation.coordinator(linger=0)
    others = [federation.node(name) for name in PLANTS[1:]]
    stopped = federation.node(
        PLANTS[0],
        until=lambda event: (
            isinstance(event, progress.Note) and "comparing its model" in event.text
        ),
    )
    assert stopped.end() is None
    for session in (coordinator, *others):
        session.end()
    federation.node(PLANTS[0]).end()
    simulated = simulate(
        federation.spec, federation.first, {n: federation.images(n) for n in PLANTS}, compare=True
    )
    assert same(federation.personal(PLANTS[0]), to_arrays(simulated.models[PLANTS[0]].tensors))


def lying(training: Training, options: class_sums.Options) -> Method:
    """It claims ten thousand images of the first class."""

    def claim(*arguments: Any) -> Arrays:
        sums = class_sums.make(*arguments)
        return sums | {class_sums.COUNTS: sums[class_sums.COUNTS] + np.array([10_000, 0, 0])}

    method = class_sums.make_method(training, options)
    assert method.statistics is not None
    return method._replace(statistics=method.statistics._replace(make=claim))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"method": "lying"}, "a node cannot have 100"),
        (
            {"preprocessing": Preprocessing(size=32, mean=(0, 0, 0))},
            "with another encoder or preprocessing",
        ),
    ],
    ids=["lies", "another preprocessing"],
)
def test_a_node_with_false_statistics_is_named_and_the_others_have_their_result(
    change: dict[str, Any],
    why: str,
    endpoint: Endpoint,
    plants: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, two = class_sums.register(monkeypatch), Participation(quorum=2)
    monkeypatch.setitem(METHODS, "lying", Entry(class_sums.Options, lying))
    federation = Federation(
        endpoint, plants, tmp_path, "-".join(("false", *change)), 1, two, method
    )
    spec, coordinator = federation.spec, federation.coordinator()
    with federation.opened_by(3, coordinator):
        honest = [federation.node(name) for name in PLANTS[:2]]
        federation.spec = msgspec.structs.replace(spec, **change)
        liar = federation.node(PLANTS[2])
    refused = coordinator.wait_for(progress.NodeRefused)
    assert isinstance(refused, progress.NodeRefused)
    assert (refused.node, refused.round) == (PLANTS[2], 1)
    assert why in refused.reason
    with pytest.raises(EdgeNodeError, match=why):
        liar.end()
    outcome = coordinator.end()
    for node in honest:
        node.end()
    assert isinstance(outcome, Outcome)
    assert federation.contributors() == [{*PLANTS[:2]}]
    federation.spec = spec
    shared = {name: federation.images(name) for name in PLANTS[:2]}
    assert same(outcome.broadcast, simulate(spec, federation.first, shared).broadcast)


@pytest.mark.slow
def test_a_deadline_closes_a_round_without_the_slow_and_they_catch_up_with_the_newest(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "deadline", 4, Participation(quorum=2))
    coordinator = federation.coordinator()
    with federation.opened_by(3, coordinator):
        nodes = {name: federation.node(name) for name in PLANTS}
    coordinator.wait_for(progress.RoundClosed)
    nodes[PLANTS[2]].stop()
    coordinator.wait_for(progress.NodeLost)
    coordinator.wait_for(progress.RoundClosed)
    nodes[PLANTS[2]] = federation.node(PLANTS[2])
    for session in (coordinator, *nodes.values()):
        session.end()
    assert all({*PLANTS[:2]} <= each for each in federation.contributors())
    assert len(federation.contributors()) == 4


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, as a failing disk does."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_a_broadcast_that_the_disk_changes_is_served_as_it_was(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """It is changed while it is served: the third node, which was away, comes for it later."""
    federation = Federation(endpoint, plants, tmp_path, "changed", 2, Participation())
    coordinator = federation.coordinator()
    nodes = [federation.node(name) for name in PLANTS[:2]]
    away = federation.node(PLANTS[2], until=lambda event: isinstance(event, progress.RoundOpened))
    assert away.end() is None
    shutil.rmtree(tmp_path / PLANTS[2] / "blobs")
    for _ in nodes:
        coordinator.wait_for(progress.Contribution)
    path = tmp_path / "coordinator" / "blobs" / retained_round(endpoint, "changed").digest
    flip(path)
    nodes.append(federation.node(PLANTS[2]))
    told = coordinator.wait_for(progress.Note)
    while str(path) not in told.text:  # type: ignore[union-attr]
        told = coordinator.wait_for(progress.Note)
    assert "written again" in told.text  # type: ignore[union-attr]
    outcome = coordinator.end()
    for node in nodes:
        node.end()
    images = {name: federation.images(name) for name in PLANTS}
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulate(federation.spec, federation.first, images).broadcast)


def retained_round(broker: Endpoint, federation: str) -> Manifest:
    """What the open round starts from."""
    topic = topics.round_state(federation)
    broadcast = decode(read_retained(broker, [topic], wait=5)[topic], RoundState).broadcast
    assert broadcast
    return broadcast


def test_a_late_contribution_is_not_counted_and_its_node_is_told(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """The slow node trains for seconds; after a third of one two contributions suffice."""
    federation = Federation(
        endpoint, plants, tmp_path, "late", 30, Participation(quorum=2, deadline=0.3)
    )
    coordinator = federation.coordinator()
    nodes = [federation.node(name) for name in PLANTS[:2]]
    training = msgspec.structs.replace(federation.spec.training, local_epochs=20)
    federation.spec = msgspec.structs.replace(federation.spec, training=training)
    straggler = federation.node(PLANTS[2])
    late = coordinator.wait_for(progress.Late)
    # A busy machine may make any of them late
    while late.node != PLANTS[2]:  # type: ignore[union-attr]
        late = coordinator.wait_for(progress.Late)
    assert isinstance(late, progress.Late)
    straggler.wait_for(late)
    for session in (straggler, coordinator, *nodes):
        session.stop()
    assert federation.contributors()[late.round - 1] == {*PLANTS[:2]}


@pytest.mark.slow
def test_a_federation_may_start_with_fewer_nodes_and_others_join_late(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "start", 200, Participation(quorum=2))
    coordinator = federation.coordinator()
    nodes = [federation.node(name) for name in PLANTS[:2]]
    coordinator.wait_for(progress.RoundClosed)
    nodes.append(federation.node(PLANTS[2]))
    contribution = coordinator.wait_for(progress.Contribution)
    while contribution.node != PLANTS[2]:  # type: ignore[union-attr]
        contribution = coordinator.wait_for(progress.Contribution)
    coordinator.wait_for(progress.RoundClosed)
    for session in (coordinator, *nodes):
        session.stop()
    assert federation.contributors()[0] == {*PLANTS[:2]}
    assert federation.contributors()[contribution.round - 1] == {*PLANTS}  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_federation_below_its_quorum_pauses_says_so_to_all_and_resumes_by_itself(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "paused", 12, Participation())
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    coordinator.wait_for(progress.RoundClosed)
    nodes[PLANTS[0]].stop()
    paused = coordinator.wait_for(progress.Paused)
    assert isinstance(paused, progress.Paused)
    assert paused.waiting_for == [PLANTS[0]]
    said = nodes[PLANTS[1]].wait_for(progress.Note)
    while "paused" not in said.text:  # type: ignore[union-attr]
        said = nodes[PLANTS[1]].wait_for(progress.Note)
    nodes[PLANTS[0]] = federation.node(PLANTS[0])
    coordinator.wait_for(progress.NodeJoined)
    coordinator.wait_for(progress.RoundClosed)
    for session in (coordinator, *nodes.values()):
        session.end()
    assert [len(each) for each in federation.contributors()] == [3] * 12


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedavg", {"epochs": "2"}), pytest.param(class_sums.NAME, {}, marks=pytest.mark.slow)],
)
def test_a_finished_coordinator_serves_the_result_again_to_a_node_that_was_away(
    method: str,
    options: dict[str, str],
    endpoint: Endpoint,
    plants: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes want the last average, or the totals:
    one leaves after its last contribution and comes back days later.
    """
    class_sums.register(monkeypatch)
    federation = Federation(
        endpoint, plants, tmp_path, f"served-{method}", 1, Participation(), method, **options
    )
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    nodes[PLANTS[0]].wait_for(progress.Contribution)
    nodes[PLANTS[0]].stop()
    assert isinstance(coordinator.end(), Outcome)
    for name in PLANTS[1:]:
        nodes[name].end()
    if (tmp_path / PLANTS[0] / "model").exists():
        pytest.skip("the node was faster than we")
    again, back = federation.coordinator(linger=4), federation.node(PLANTS[0])
    assert isinstance(again.end(), Outcome)
    back.end()
    assert load_metadata(tmp_path / PLANTS[0] / "model").round == 1
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert same(federation.personal(PLANTS[0]), to_arrays(simulated.models[PLANTS[0]].tensors))


def test_aborting_a_suspended_run_tells_its_nodes(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(endpoint, plants, tmp_path, "aborted", 500, Participation())
    coordinator = federation.coordinator()
    nodes = [federation.node(name) for name in PLANTS]
    coordinator.wait_for(progress.RoundClosed)
    assert coordinator.stop() is None
    federation.abort()
    for node in nodes:
        with pytest.raises(EdgeNodeError, match="a trial"):
            node.end()


def test_after_a_finished_run_another_one_begins_from_any_state_folder(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """A coordinator that was served its own old presence by the broker took it for another
    one's.
    """
    federation = Federation(endpoint, plants, tmp_path / "first", "again", 1, Participation())
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    for session in sessions:
        session.end()
    with pytest.raises(UsageError, match="finished"):
        federation.abort()
    for _ in range(2):
        assert isinstance(federation.coordinator().end(), Outcome)
    for folder in ("second", "third"):
        assert (
            Federation(endpoint, plants, tmp_path / folder, "again", 1, Participation())
            .coordinator()
            .stop()
            is None
        )
