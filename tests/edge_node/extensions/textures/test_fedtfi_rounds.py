"""Rounds of FedTFI: what the bank holds in each, over a broker as in simulation,
with bad peers and without leavers.
"""

import functools
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import PeerError, UsageError
from broker_config.protocol.messages import Aggregation, Contribution, Manifest, Spec, Training
from edge_node.extensions.textures import patch_bank
from tests.support.plants import CLASSES, draw, load_images
from tests.support.threaded_federation import PLANTS, Federation, same
from trainer import progress
from trainer.data.class_folders import Images
from trainer.federation.client.join import join
from trainer.federation.client.session_events import Contributed, Refined
from trainer.federation.client.training_thread import Worker
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Participation, Request, draft
from trainer.federation.simulation import SimulationResult, simulate
from trainer.methods import complete_options, make
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import to_arrays
from trainer.training.participant import Participant

SHOWN = {"quota": "6", "capacity": "15"}
MODEL = "fedtfi_small"


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three plants with ten images of each of two classes:
    so many that none is judged by cross-validation.
    """
    folder, known = tmp_path_factory.mktemp("plants"), (CLASSES[:2], CLASSES[1:], CLASSES[::2])
    return {name: draw(folder / name, 10, seed, known[seed]) for seed, name in enumerate(PLANTS)}


def drafted(
    method: str = "fedtfi", rule: Any = "mean", rounds: int = 3, **options: str
) -> tuple[Spec, Arrays]:
    training = {"local_epochs": 1, "augment": False}
    given = options if method != "fedtfi" else SHOWN | options
    asked = "mean" if rule == "multi_krum" else rule
    request = Request(
        method, given, MODEL, "none", 0, training, rounds=rounds, seed=3, aggregate=asked
    )
    spec, broadcast = draft(request, federation="textile", classes=CLASSES, nodes=3)
    if rule == "multi_krum":
        # three nodes stand no liar
        spec = msgspec.structs.replace(spec, aggregation=Aggregation(rule))
    return spec, broadcast


@pytest.fixture(scope="module")
def images(plants: dict[str, Path]) -> dict[str, Images]:
    spec, _ = drafted()
    loaded = {name: load_images(spec, folder) for name, folder in plants.items()}
    return {
        name: each._replace(train=each.train.take(np.arange(0, 16, 2)))
        for name, each in loaded.items()
    }


Run = Callable[..., SimulationResult]


@pytest.fixture(scope="module")
def run(images: dict[str, Images]) -> Run:
    """A federation in simulation, as `drafted`; the same one once for all tests."""
    return functools.cache(lambda *how, **options: simulate(*drafted(*how, **options), images))


def owners(broadcast: Arrays) -> set[str]:
    known = {float(patch_bank.hash_owner(node)): node for node in PLANTS}
    return {known[owner] for owner in broadcast["bank.owners"].tolist() if owner >= 0}


# What a round makes of the bank


def test_round_1_has_an_empty_bank_and_is_cross_entropy_alone(run: Run) -> None:
    after, plain = (run(method, rounds=1).broadcast for method in ("fedtfi", "fedavg"))
    assert same(select(after, ("encoder", "classifier")), plain)
    assert owners(after) == {*PLANTS}


def test_later_rounds_have_a_triplet_loss_and_no_model_holds_the_bank(run: Run) -> None:
    models = run(rounds=2).models.values()
    first, second = zip(
        *([entry["L_T"] for entry in model.metadata.history] for model in models), strict=True
    )
    assert first == (0, 0, 0)
    assert max(second) > 0
    shares = [tuple(entry["patched"] for entry in model.metadata.history) for model in models]
    assert (0, 1) in shares
    assert not any(name.startswith("bank") for model in models for name in model.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["triplet", "samples", "mixed"])
def test_all_metrics_that_are_reported_are_explained_and_no_others(run: Run, use: str) -> None:
    declared = {
        metric.key
        for metric in make("fedtfi", Training(), complete_options("fedtfi", {"use": use})).metrics
    }
    for model in run(rounds=2, use=use).models.values():
        assert {key for entry in model.metadata.history for key in entry} - {
            "round",
            "accuracy",
            "accuracy_all",
        } == declared


def test_the_bank_holds_labelled_patches_of_received_maps_and_is_as_large_as_agreed(
    images: dict[str, Images],
) -> None:
    """By hand: what a plant has sent are cells of the maps that the received encoder makes of
    its images.
    """
    spec, broadcast = drafted()
    participant = Participant(spec, PLANTS[0], images[PLANTS[0]])
    _, sent, _ = participant.contribute(participant.start(broadcast), broadcast, 1)
    assert sent.tensors[patch_bank.VALUES].shape == (6, 64, 2, 2)
    data, received = participant.data, participant.received(broadcast)
    maps = participant.network.part(
        "project", received, data.encoder_input(participant.network, received, slice(None))
    ).numpy()
    cells = (
        maps.reshape(*maps.shape[:2], 8, 2, 8, 2)
        .transpose(0, 1, 2, 4, 3, 5)
        .reshape(*maps.shape[:2], 64, 2, 2)
    )
    for patch, label in zip(
        sent.tensors[patch_bank.VALUES], sent.tensors[patch_bank.LABELS], strict=True
    ):
        # in every channel
        found = np.isclose(cells, patch[:, None], atol=1e-5).all((3, 4)).any(2).all(1)
        assert label in data.labels.numpy()[found]
    assert [broadcast[name].shape for name in ("bank.patches", "bank.labels")] == [
        (15, 64, 2, 2),
        (15,),
    ]


def test_the_order_of_the_nodes_makes_no_difference(run: Run, images: dict[str, Images]) -> None:
    again = simulate(*drafted(rounds=2), dict(reversed(images.items())))
    assert same(run(rounds=2).broadcast, again.broadcast)


def test_rules_against_liars_apply_to_models_and_leave_the_bank_as_it_is(run: Run) -> None:
    robust, plain = run(rule="multi_krum", rounds=1).broadcast, run("fedtfi", rounds=1).broadcast
    assert same(select(robust, ("bank",)), select(plain, ("bank",)))
    assert not same(select(robust, ("encoder",)), select(plain, ("encoder",)))


def test_interpolation_alone_trains_on_mixed_maps_and_has_no_triplet_loss(run: Run) -> None:
    mixed = run(rounds=2, use="mixed")
    assert not any(
        "L_T" in entry for model in mixed.models.values() for entry in model.metadata.history
    )
    first = {name: model.metadata.history[0]["L_C"] for name, model in mixed.models.items()}
    assert first == {
        name: model.metadata.history[0]["L_C"] for name, model in run(rounds=2).models.items()
    }
    assert not same(mixed.broadcast, run(rounds=2).broadcast)


def test_negatives_may_be_other_images_instead_of_patches_of_another_label(run: Run) -> None:
    """Which are so far away here that the margin of 1 asks nothing of them."""
    after, patched = run(rounds=2, use="samples", margin="100"), run(rounds=2, margin="100")
    assert max(model.metadata.history[1]["L_T"] for model in after.models.values()) > 0
    assert not same(after.broadcast, patched.broadcast)
    assert same(run(rounds=1, use="samples", margin="100").broadcast, run(rounds=1).broadcast), (
        "there is nothing to exchange yet"
    )


def test_what_hides_a_patch_is_drawn_from_the_nodes_own_secret_and_nothing_else_is(
    images: dict[str, Images],
) -> None:
    name = PLANTS[0]
    for options, hidden in (({}, False), ({"noise": "0.5"}, True), ({"mix": "2"}, True)):
        spec, broadcast = drafted(**options)
        sent = []
        for secret in ("a", "b"):
            node = Participant(spec, name, images[name], secret=secret)
            sent.append(node.contribute(node.start(broadcast), broadcast, 1)[1].tensors)
        assert same(*(select(each, ("encoder", "classifier")) for each in sent))
        assert same(*(select(each, ("patches",)) for each in sent)) == (not hidden)


def test_another_process_of_a_node_sends_the_same_patches_with_the_same_noise(
    images: dict[str, Images], tmp_path: Path
) -> None:
    """Two releases of a patch with other noise tell more of it than one."""
    spec, broadcast = drafted(noise="1")
    inbox: queue.Queue[object] = queue.Queue()
    sent = []
    for name, folder in (("plant-a", "a"), ("plant-a", "a"), ("plant-a", "another")):
        worker = Worker(spec, name, images[name], tmp_path / folder, inbox)
        if worker.progress:
            worker.go_back(1)
        digest, size = worker.store.put(encode_tensors(broadcast))
        manifest = Manifest(
            federation="textile",
            run=spec.run,
            round=1,
            node="coordinator",
            digest=digest,
            size=size,
            chunk_size=1024,
        )
        worker.train(manifest, counted=False)
        made = inbox.get(timeout=60)
        assert isinstance(made, Contributed), made
        assert isinstance(inbox.get(timeout=60), Refined)
        worker.close()
        assert made.progress.blob
        tensors = load_file(worker.store.path(made.progress.blob.digest))
        sent.append(select(tensors, spec.relays))
    assert same(sent[0], sent[1])
    assert not same(sent[0], sent[2])


# no maps; maps, but a trunk between them and features
@pytest.mark.parametrize("model", ["small", "resnet_small"])
def test_a_model_that_is_not_put_together_as_fedtfis_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="FedTFI"):
        draft(Request("fedtfi", {}, model, "none"), federation="f", classes=CLASSES, nodes=2)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"channels": "65"}, "65 channels"),
        *(({name: "65536", "mask": "3"}, "144 MiB") for name in ("quota", "capacity")),
    ],
)
def test_more_channels_than_there_are_and_more_patches_than_fit_into_memory_are_refused(
    options: dict[str, str], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        drafted(**options)


# An exchange that teaches nothing


def warnings(told: list[progress.AnyEvent]) -> list[str]:
    return [
        event.text
        for event in told
        if isinstance(event, progress.Note) and "teaches nothing" in event.text
    ]


def own_label(number: int, images: Images) -> Images:
    """Of a plant's images those of one label, which is no other plant's."""
    return images._replace(train=images.train.take(np.flatnonzero(images.train.labels == number)))


@pytest.mark.parametrize("use", ["triplet", "samples", "mixed"])
def test_plants_whose_labels_no_other_has_are_named_once_and_train_as_by_fedavg(
    images: dict[str, Images], use: str
) -> None:
    apart = {name: own_label(number, images[name]) for number, name in enumerate(PLANTS)}
    told: list[progress.AnyEvent] = []
    after = simulate(*drafted(use=use), apart, told.append)
    (warning,) = warnings(told)
    assert warning.startswith(
        "round 2: no patches of others fit the images of plant-a, plant-b, plant-c"
    )
    assert same(
        select(after.broadcast, ("encoder", "classifier")),
        simulate(*drafted("fedavg"), apart).broadcast,
    )
    assert {
        entry["patched"] for model in after.models.values() for entry in model.metadata.history
    } == {0}


def test_only_plants_that_are_alone_with_their_labels_are_named(images: dict[str, Images]) -> None:
    told: list[progress.AnyEvent] = []
    alone = {
        **{name: own_label(1, images[name]) for name in PLANTS[:2]},
        PLANTS[2]: own_label(2, images[PLANTS[2]]),
    }
    simulate(*drafted(rounds=2), alone, told.append)
    assert "images of plant-c: " in warnings(told)[0]


@pytest.mark.slow
def test_it_is_said_that_no_label_has_as_many_images_as_are_mixed(
    images: dict[str, Images],
) -> None:
    told: list[progress.AnyEvent] = []
    assert owners(simulate(*drafted(rounds=2, mix="6"), images, told.append).broadcast) == set()
    assert len(warnings(told)) == 1


@pytest.mark.slow
def test_an_exchange_that_reaches_everybody_is_not_warned_of(images: dict[str, Images]) -> None:
    told: list[progress.AnyEvent] = []
    simulate(*drafted(rounds=2, quota="24", capacity="72"), images, told.append)
    simulate(*drafted("fedavg", rounds=2), images, told.append)
    assert warnings(told) == []


# Peers that cannot be honest


def mislabelled(sent: Arrays) -> None:
    sent[patch_bank.LABELS][0] = len(CLASSES)


def fractional(sent: Arrays) -> None:
    sent[patch_bank.LABELS][0] = 0.5


def poisoned(sent: Arrays) -> None:
    sent[patch_bank.VALUES][0, 0, 0, 0] = np.nan


def huge(sent: Arrays) -> None:
    sent[patch_bank.VALUES][0, 0, 0, 0] = 1e6


def misshapen(sent: Arrays) -> None:
    sent[patch_bank.VALUES] = sent[patch_bank.VALUES][:, :, :1]


def too_many(sent: Arrays) -> None:
    sent |= {
        name: np.concatenate([sent[name], sent[name]])
        for name in (patch_bank.VALUES, patch_bank.LABELS)
    }


def none_at_all(sent: Arrays) -> None:
    del sent[patch_bank.VALUES], sent[patch_bank.LABELS]


DEEDS: dict[Callable[[Arrays], None], str] = {
    mislabelled: "labelled 3; labels are 0 to 2",
    fractional: "labelled 0.5",
    poisoned: "NaN or infinity",
    huge: "a value beyond",
    misshapen: "shape",
    too_many: "promises|larger than",
    none_at_all: "missing",
}


def stored(ledger: Ledger, node: str, tensors: Arrays) -> Contribution:
    digest, size = ledger.store.put(encode_tensors(tensors))
    blob = Manifest(
        federation="textile",
        run=ledger.spec.run,
        round=1,
        node=node,
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    return Contribution(session="5" * 16, run=ledger.spec.run, round=1, weight=9.0, blob=blob)


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_patches_that_cannot_be_honest_are_refused_with_their_node_named_and_the_round_goes_on(
    deed: Callable[[Arrays], None], tmp_path: Path
) -> None:
    spec, broadcast = drafted()
    random = np.random.default_rng(8)
    honest = {
        name: random.normal(size=tensor.shape).astype(np.float32)
        for name, tensor in spec.relays.items()
    }
    honest[patch_bank.LABELS] = random.integers(0, 3, 6).astype(np.float32)
    model = select(broadcast, spec.sends)
    with Ledger(tmp_path) as ledger:
        ledger.begin_or_continue(spec, broadcast, new=False)
        ledger.resume()
        for node in PLANTS:
            ledger.admit(node, "a" * 16)
        ledger.open_round(1, ())
        sent = {name: values.copy() for name, values in honest.items()}
        deed(sent)
        message = stored(ledger, PLANTS[2], model | sent)
        # Either of them
        with pytest.raises(PeerError, match=DEEDS[deed]) as refused:  # noqa: PT012
            ledger.validate(PLANTS[2], message)
            ledger.add_contribution(PLANTS[2], message)
        assert refused.value.peer == PLANTS[2]
        for node in PLANTS[:2]:
            ledger.add_contribution(node, stored(ledger, node, model | honest))
        assert ledger.absent == {PLANTS[2]}
        ledger.aggregate()
        assert owners(ledger.broadcast) == {*PLANTS[:2]}


# Over a broker


Begin = Callable[..., Federation]


@pytest.fixture
def begin(endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path, run: Run) -> Begin:
    """A federation over the broker.

    The network was traced before: while one thread traces, none may use torch.
    """
    run(rounds=2)
    return lambda name, rounds, options=None, **participation: Federation(
        endpoint,
        plants,
        tmp_path,
        name,
        rounds,
        Participation(**participation),
        "fedtfi",
        model=MODEL,
        **SHOWN,
        **(options or {}),
    )


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({}, "; nothing hides images in them"),
        (
            {"levels": "4", "noise": "0.5", "mix": "4"},
            "mix=4, noise=0.5, levels=4 hides images in them",
        ),
    ],
    ids=["bare", "hidden"],
)
def test_a_plant_is_told_before_anything_leaves_it_that_others_see_pieces_and_what_hides_images(
    begin: Begin,
    endpoint: Endpoint,
    plants: dict[str, Path],
    tmp_path: Path,
    options: dict[str, str],
    hidden: str,
) -> None:
    federation = begin("told" + "-hidden" * bool(options), 1, options)
    coordinator, told = federation.coordinator(), list[str]()

    def hear(event: object) -> None:
        told.append(str(event))

    name, state = PLANTS[0], tmp_path / "joined"
    given: dict[str, Any] = {
        "federation": federation.spec.federation,
        "telemetry": False,
        "wait": 10,
        "report": hear,
    }
    given["demands"] = options  # which are met
    join(
        endpoint,
        name=name,
        folder=plants[name],
        test=None,
        state=state,
        stop=lambda: "loading torch" in str(told),
        **given,
    )
    coordinator.stop()
    assert "see pieces" in str(told)
    assert hidden in str(told)


def test_a_plant_that_demands_more_than_its_federation_hides_does_not_take_part(
    begin: Begin, endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = begin("demanding", 1, {"noise": "0.5", "mix": "4"})
    coordinator, state, told = federation.coordinator(), tmp_path / "joined", list[object]()
    given: dict[str, Any] = {
        "federation": federation.spec.federation,
        "telemetry": False,
        "wait": 10,
    }
    given |= {
        "name": PLANTS[0],
        "folder": plants[PLANTS[0]],
        "test": None,
        "state": state,
        "report": told.append,
    }
    with pytest.raises(UsageError, match=r"lacks noise=1.*levels=8") as refused:
        join(endpoint, demands={"noise": "1", "mix": "2", "levels": "8"}, **given)
    assert "--demand" in refused.value.remedy
    with pytest.raises(UsageError, match=r"\bnois\b"):
        join(endpoint, demands={"nois": "1"}, **given)
    coordinator.stop()
    assert "all other nodes" not in str(told)
    assert not state.exists()


@pytest.mark.slow
def test_each_plant_says_once_that_what_the_others_sent_does_not_fit_its_images(
    begin: Begin,
) -> None:
    alone = begin("alone", 3, {"mix": "64"})
    coordinator, nodes = alone.coordinator(), {name: alone.node(name) for name in PLANTS}
    for name, node in nodes.items():
        node.wait_for(progress.FederationFinished)
        (warning,) = warnings(node.told)
        assert f"images of {name}: " in warning
        node.end()
    coordinator.end()


@pytest.mark.slow
def test_a_coordinator_and_a_node_that_stop_in_a_round_change_no_byte_of_models_or_bank(
    begin: Begin,
) -> None:
    """Some patches of the open round are on the coordinator's disk:
    of them and the rest it makes the same bank.
    """
    told = begin("stopped", 2)
    coordinator = told.coordinator()
    early = [told.node(name) for name in PLANTS[:2]]
    late = told.node(PLANTS[2])
    coordinator.wait_for(progress.RoundClosed)
    late.stop()
    coordinator.wait_for(progress.Contribution)
    assert coordinator.stop() is None
    again, late = told.coordinator(), told.node(PLANTS[2])
    outcome = again.end()
    for node in (*early, late):
        node.end()
    images = {name: told.images(name) for name in PLANTS}
    simulated = simulate(told.spec, told.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert owners(outcome.broadcast) == {*PLANTS}
    assert same(outcome.broadcast, simulated.broadcast)
    assert all(
        same(told.personal(name), to_arrays(simulated.models[name].tensors)) for name in PLANTS
    )


@pytest.mark.slow
def test_who_leaves_has_its_patches_gone_from_the_next_bank(begin: Begin) -> None:
    told = begin("left", 4, quorum=2)
    coordinator = told.coordinator()
    with told.opened_by(3, coordinator):
        nodes = {name: told.node(name) for name in PLANTS}
    coordinator.wait_for(progress.RoundClosed)
    nodes[PLANTS[2]].stop()
    coordinator.wait_for(progress.NodeLost)
    outcome = coordinator.end()
    for name in PLANTS[:2]:
        nodes[name].end()
    assert told.contributors()[0] == {*PLANTS}
    assert told.contributors()[-1] == {*PLANTS[:2]}
    assert owners(outcome.broadcast) == {*PLANTS[:2]}


@pytest.mark.slow
def test_who_is_not_drawn_for_a_round_keeps_its_patches_in_the_bank(begin: Begin) -> None:
    told = begin("sampled", 3, sample=2)
    sessions = [told.coordinator(), *(told.node(name) for name in PLANTS)]
    outcome, *_ = [session.end() for session in sessions]
    assert {*PLANTS} == set.union(*told.contributors()) == owners(outcome.broadcast)
    images = {name: told.images(name) for name in PLANTS}
    simulated = simulate(told.spec, told.first, images, compare=True)
    assert same(outcome.broadcast, simulated.broadcast)
