"""Secure aggregation over a broker: the open sum's bytes,
and nobody sees what one node has contributed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError, UsageError
from tests.support.authority import Authority
from tests.support.foreign_masking import DEAD, MaskingForeignNode
from tests.support.mqtt_subscriber import subscriber
from tests.support.plants import CLASSES, draw
from tests.support.threaded_federation import PLANTS, Federation, end_all, same
from trainer import progress
from trainer.federation import masking
from trainer.federation.client.checkpoint import find_progress
from trainer.federation.masking import step_parts
from trainer.federation.masking.grid import contribution_words
from trainer.federation.server.coordinator import masking_machine, round_state
from trainer.federation.server.coordinator.effects import Say
from trainer.federation.server.coordinator.masking_state import Masking
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.operator_actions import request
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.methods import make
from trainer.models.network import to_arrays


def found(
    broker: Endpoint, plants: dict[str, Path], folder: Path, name: str, **options: object
) -> Federation:
    """Found a federation whose contributions are masked."""
    settings = {"participation": Participation(), "rounds": 2, "method": "fedavg", **options}
    return Federation(
        broker,
        plants,
        folder,
        name,
        signers=Authority(name).signers(),
        encryption="group",
        secure_aggregation=True,
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [("afedcl", {"weights": "images"}), ("afedcl_plus", {}), ("gaussian", {})],
)
def test_masked_contributions_come_to_the_open_sum_bit_for_bit(
    method: str,
    options: dict[str, str],
    endpoint: Endpoint,
    plants: dict[str, Path],
    tmp_path: Path,
) -> None:
    rounds = 0 if method == "gaussian" else 2
    federation = found(endpoint, plants, tmp_path, method, method=method, rounds=rounds, **options)
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    end_all(sessions)
    outcome = sessions[0].end()
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)
    assert not same(outcome.broadcast, federation.first)
    assert all(
        same(federation.personal(name), to_arrays(simulated.models[name].tensors))
        for name in PLANTS
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [True, False])
def test_in_all_that_broker_and_coordinator_see_there_is_no_piece_of_what_a_node_contributes(
    is_masked: bool, endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """Without encryption the broker sees all that the coordinator does."""
    name = f"seen-{'masked' if is_masked else 'open'}"
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        name,
        1,
        Participation(),
        "fedavg",
        signers=Authority(name).signers(),
        secure_aggregation=is_masked,
    )
    with subscriber(f"mqtt://{endpoint.host}:{endpoint.port}", f"edge-node/v1/{name}/#") as seen:
        end_all([federation.coordinator(), *(federation.node(each) for each in PLANTS)])
        traffic = b"\0".join(seen.get().payload for _ in range(seen.qsize()))
    found_ = [any(piece in traffic for piece in pieces(federation, node)) for node in PLANTS]
    assert found_ == [not is_masked] * 3


def pieces(federation: Federation, node: str) -> list[bytes]:
    """Parts of what a node contributes: of its tensors,
    their differences from the broadcast, and these as words.
    """
    spec, first = federation.spec, federation.first
    progress = find_progress(federation.folder / node, spec.run).progress
    assert progress
    assert progress.blob
    tensors = load_file(federation.folder / node / "blobs" / progress.blob.digest)
    method = make(spec.method, spec.training, spec.options)
    forms = [tensors, {name: each - first[name] for name, each in tensors.items()}]
    if spec.mask_threshold:
        forms.append(contribution_words(spec, method, 1, tensors, first, progress.weight))
    return [
        each.tobytes()[start : start + 16]
        for form in forms
        for each in form.values()
        for start in range(0, each.nbytes - 16, 512)
    ]


@pytest.mark.parametrize(
    "model", ["small", pytest.param("efficientnet_lite0_mid", marks=pytest.mark.slow)]
)
def test_statistics_behind_masks_are_those_of_an_open_run(
    model: str, endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """They are whole numbers, and lose nothing on a grid."""
    federation = found(endpoint, plants, tmp_path, "sums", method="gaussian", rounds=0, model=model)
    images = {name: federation.images(name) for name in PLANTS}
    masked, open_ = (
        simulate(
            msgspec.structs.replace(federation.spec, mask_threshold=threshold),
            federation.first,
            images,
        )
        for threshold in (2, 0)
    )
    assert same(masked.broadcast, open_.broadcast)


def test_a_class_that_two_plants_have_is_announced_and_then_not_summed(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    classes = {"plant-a": CLASSES, "plant-b": CLASSES, "plant-c": CLASSES[:2]}
    plants = {
        name: draw(tmp_path / "plants" / name, 6, 1, known) for name, known in classes.items()
    }
    federation = found(endpoint, plants, tmp_path, "scarce", head="statistics", rounds=1)
    coordinator, *nodes = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    why = f"fewer than 3 nodes have images of {CLASSES[2]}"
    with pytest.raises(EdgeNodeError, match=why):
        coordinator.end()
    assert f"statistics will not be summed as it is: {why}" in coordinator.notes()
    assert federation.contributors() == [{*PLANTS}]
    for node in nodes:
        node.stop()
    with pytest.raises(EdgeNodeError, match=why):
        simulate(
            federation.spec, federation.first, {name: federation.images(name) for name in PLANTS}
        )


def test_neither_a_coordinator_nor_a_node_takes_part_without_kits(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """Masks are shared with members; without keys nobody could tell these from whoever speaks
    for them.
    """
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        "unsigned",
        2,
        Participation(),
        "fedavg",
        secure_aggregation=True,
    )
    for session in (federation.start_coordinator(), federation.node("plant-a")):
        with pytest.raises(UsageError, match="kit"):
            session.end()


def test_a_node_does_not_join_where_too_few_unmask_a_sum(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = found(endpoint, plants, tmp_path, "weak")
    strong = federation.spec
    nodes = masking.MOST_NODES + 1
    threshold, neighbours = masking.least_threshold(nodes), masking.least_neighbours(nodes)
    many = {
        "nodes": nodes,
        "quorum": nodes,
        "mask_threshold": threshold,
        "mask_neighbours": neighbours,
    }
    for name, weak, why in (
        (
            "plant-a",
            {"mask_threshold": 1},
            "lets 1 of 3 nodes unmask a sum, each with shares for all others, which",
        ),
        ("plant-b", {"mask_neighbours": 2}, "each with shares for 2 others, which protects nobody"),
        ("plant-c", many, "lets 668 of 1001 nodes unmask a sum"),
    ):
        federation.spec = msgspec.structs.replace(strong, **weak)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=why):
            federation.node(name).end()


def test_a_node_that_cannot_mask_is_not_let_in(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """It is one of an earlier version, to which the spec says nothing of masks:
    its contribution would be open.
    """
    federation = found(endpoint, plants, tmp_path, "older")
    coordinator = federation.coordinator()
    federation.spec = msgspec.structs.replace(federation.spec, mask_threshold=0)
    with pytest.raises(EdgeNodeError, match="masks"):
        federation.node("plant-a").end()
    coordinator.stop()


class Foreign(NamedTuple):
    """A federation of FedAvg in which nodes written from the page can take part."""

    federation: Federation
    broker: Endpoint
    authority: Authority

    def node(self, name: str, dies_at: str = "") -> MaskingForeignNode:
        """It moves all tensors by 0.01, and weighs so much that others hardly do."""
        keys = {
            name: Ed25519PrivateKey.from_private_bytes(key.raw)
            for name, key in self.authority.keys.items()
        }
        public = {name: key.public_key() for name, key in keys.items()}
        return MaskingForeignNode(
            self.broker.port,
            name,
            weight=3000,
            shift=0.01,
            coordinator=public["coordinator"],
            members=public,
            key=keys[name],
            dies_at=dies_at,
        )


@pytest.fixture
def foreign(plants: dict[str, Path], tmp_path: Path) -> Iterator[Foreign]:
    """Their federation has one name in all tests, so each has a broker that has kept nothing."""
    authority = Authority("default")
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        federation = Federation(
            Endpoint.parse(running.url),
            plants,
            tmp_path,
            "default",
            2,
            Participation(quorum=2),
            "fedavg",
            signers=authority.signers(),
            encryption="group",
            secure_aggregation=True,
            epochs="1",
        )
        yield Foreign(federation, Endpoint.parse(running.url), authority)


@pytest.mark.slow
def test_a_node_written_from_the_page_masks_what_it_contributes(foreign: Foreign) -> None:
    """It has contributed its shift alone: the result tells that all masks have gone."""
    federation = foreign.federation
    federation.spec = msgspec.structs.replace(federation.spec, quorum=3)
    coordinator, node = federation.coordinator(), federation.node(PLANTS[0])
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda name: foreign.node(name).run(), PLANTS[1:]))
    outcome = coordinator.end()
    node.end()
    assert isinstance(outcome, Outcome)
    assert all(same(outcome.broadcast, result) for result in results)
    moved = outcome.broadcast["classifier.bias"] - federation.first["classifier.bias"]
    assert moved == pytest.approx(0.02, abs=1e-4)
    assert federation.contributors() == [{*PLANTS}] * 2


@pytest.mark.slow
def test_where_nodes_share_with_some_others_alone_a_node_written_from_the_page_does_so_too(
    plants: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As more than two hundred do; steps come in parts, since none fits into one message here."""
    names = (*PLANTS, "plant-d", "plant-e")
    for limit in ("least_neighbours", "most_neighbours"):
        monkeypatch.setattr(masking, limit, lambda _: 2)
    monkeypatch.setattr(step_parts, "MAX_MESSAGE", 1500)
    authority = Authority("default", nodes=names)
    images = plants | dict.fromkeys(names[3:], plants[PLANTS[0]])
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        broker = Endpoint.parse(running.url)
        federation = Federation(
            broker,
            images,
            tmp_path,
            "default",
            2,
            Participation(),
            "fedavg",
            signers=authority.signers(),
            encryption="group",
            secure_aggregation=True,
            nodes=len(names),
            epochs="1",
        )
        assert (federation.spec.mask_threshold, federation.spec.mask_neighbours) == (4, 2)
        sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
        with ThreadPoolExecutor(2) as pool:
            nodes = [Foreign(federation, broker, authority).node(name) for name in names[3:]]
            results = list(pool.map(MaskingForeignNode.run, nodes))
        outcome = sessions[0].end()
        end_all(sessions)
    assert isinstance(outcome, Outcome)
    assert all(same(outcome.broadcast, result) for result in results)
    moved = outcome.broadcast["classifier.bias"] - federation.first["classifier.bias"]
    assert moved == pytest.approx(0.02, abs=2e-4)
    assert federation.contributors() == [{*names}] * 2
    assert all(node.most_parts > 1 for node in nodes)


def test_the_sum_of_those_who_are_left_is_read_when_one_is_lost_after_its_masks_count(
    foreign: Foreign,
) -> None:
    """A third of the nodes has shared its secrets, and never contributes:
    its masks are in the others' words.
    """
    federation = foreign.federation
    federation.spec = msgspec.structs.replace(federation.spec, rounds=1)
    sessions = [federation.coordinator()]
    with federation.opened_by(3, sessions[0]):
        sessions += [federation.node(name) for name in PLANTS[:2]]
        assert foreign.node(PLANTS[2], "shares").run(dies_in=DEAD) == {}
    end_all(sessions)
    outcome = sessions[0].end()
    assert isinstance(outcome, Outcome)
    images = {name: federation.images(name) for name in PLANTS[:2]}
    assert same(outcome.broadcast, simulate(federation.spec, federation.first, images).broadcast)
    assert federation.contributors() == [{*PLANTS[:2]}]


def test_what_one_has_contributed_who_is_lost_before_it_reveals_anything_is_in_the_sum(
    foreign: Foreign,
) -> None:
    federation = foreign.federation
    federation.spec = msgspec.structs.replace(federation.spec, rounds=1)
    sessions = [federation.coordinator()]
    with federation.opened_by(3, sessions[0]):
        sessions += [federation.node(name) for name in PLANTS[:2]]
        assert foreign.node(PLANTS[2], "survivors").run(dies_in=DEAD) == {}
    end_all(sessions)
    outcome = sessions[0].end()
    assert isinstance(outcome, Outcome)
    moved = outcome.broadcast["classifier.bias"] - federation.first["classifier.bias"]
    assert moved == pytest.approx(0.01, abs=2e-4)
    assert federation.contributors() == [{*PLANTS}]


def test_a_round_that_waits_for_who_is_lost_goes_on_once_the_operator_has_dropped_it(
    foreign: Foreign,
) -> None:
    """Its masks are in the others' words, and are taken away as those of who is lost."""
    federation = foreign.federation
    federation.spec = msgspec.structs.replace(federation.spec, rounds=1, quorum=3)
    coordinator, *nodes = [
        federation.coordinator(),
        *(federation.node(name) for name in PLANTS[:2]),
    ]
    assert foreign.node(PLANTS[2], "shares").run(dies_in=DEAD) == {}
    for _ in nodes:
        coordinator.wait_for(progress.Contribution)
    request(federation.folder / "coordinator", "drop", "tester", PLANTS[2])
    end_all([coordinator, *nodes])
    outcome = coordinator.end()
    assert isinstance(outcome, Outcome)
    images = {name: federation.images(name) for name in PLANTS[:2]}
    assert same(outcome.broadcast, simulate(federation.spec, federation.first, images).broadcast)


def test_a_coordinator_that_lies_about_who_has_dropped_out_is_reported_by_the_node_that_it_tells(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants the sum of all and then that of two, whose difference is what the third has sent."""
    honest = masking_machine.settle

    def lie(state: Masking, of: round_state.Federation) -> masking_machine.Step:
        state, due = honest(state, of)
        told = [each.step for each in due if isinstance(each, Say) and each.step.survivors]
        again = [
            Say(PLANTS[0], msgspec.structs.replace(each, survivors=PLANTS[:2])) for each in told[:1]
        ]
        return state, [*due, *again]

    monkeypatch.setattr(masking_machine, "settle", lie)
    federation = found(endpoint, plants, tmp_path, "lied-to", participation=Participation(quorum=2))
    sessions = [federation.coordinator()]
    with federation.opened_by(3, sessions[0]):
        sessions += [federation.node(name) for name in PLANTS]
    with pytest.raises(EdgeNodeError, match=r"round 1 .*other survivors"):
        sessions[1].end()
    for session in (sessions[0], *sessions[2:]):
        session.stop()
