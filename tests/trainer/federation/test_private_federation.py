"""Private federations: what leaves a node holds noise, made again it is the same,
and everybody tells one epsilon.
"""

import contextlib
import json
import queue
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from broker_config.broker.embedded import start_broker
from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Manifest, Spec
from edge.bundle.bundle_format import read_bundle
from tests.support.changed_specs import changed
from tests.support.plants import CLASSES, draw, drawn_weights, here, load_images, start, wait_for
from tests.support.waiting import heard
from trainer import progress
from trainer.data.class_folders import Images
from trainer.data.partition import Scheme
from trainer.federation.client.privacy_file import open_account
from trainer.federation.client.training_thread import Contributed, Refined, Worker
from trainer.federation.server.journal import newest_run
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate, simulate_folder
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import Arrays
from trainer.models.network import to_arrays
from trainer.privacy.spent_account import Account
from trainer.training.conclusion import conclude
from trainer.training.participant import Participant, State
from trainer.training.personal_model import load_metadata
from trainer.training.privacy_plan import planned_epsilon

METHODS = ("fedavg", "gaussian", "afedcl_plus")


def drafted(method: str, epsilon: str = "8", **changes: Any) -> tuple[Spec, Arrays]:
    training = {"batch_norm": "eval", "local_epochs": 1}
    request = Request(
        method,
        model="small",
        weights="none",
        size=32,
        training=training,
        seed=7,
        privacy={"epsilon": epsilon},
    )
    request = request if method == "gaussian" else request._replace(rounds=2)
    spec, broadcast = draft(
        request._replace(**changes), federation="steel", classes=CLASSES, nodes=2
    )
    return msgspec.structs.replace(spec, run="1" * 16), broadcast  # noise depends on it


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("images")
    return {name: draw(folder / name, 8, seed) for seed, name in enumerate(("plant-a", "plant-b"))}


@pytest.fixture(scope="module")
def images(folders: dict[str, Path]) -> dict[str, Images]:
    return {name: load_images(drafted("gaussian")[0], folder) for name, folder in folders.items()}


def test_a_simulation_says_what_its_federation_would_spend(folders: dict[str, Path]) -> None:
    request = Request(
        "gaussian", model="small", weights="none", size=32, seed=7, privacy={"epsilon": "2"}
    )
    told: list[progress.AnyEvent] = []
    scheme = Scheme("disjoint", 2, 6, 7, {"classes_per_node": 2}, "all")
    report = simulate_folder(request, [folders["plant-a"]], {}, scheme, None, told.append)
    (said,) = [
        each.text for each in told if isinstance(each, progress.Note) and "private" in each.text
    ]
    assert said.startswith(
        "this federation is private: what leaves a node spends epsilon 2 of each of its training"
    )
    assert all(node.history[-1]["epsilon"] == pytest.approx(2, abs=0.01) for node in report.nodes)


@pytest.mark.parametrize("method", METHODS)
def test_what_leaves_a_node_depends_on_its_secret_and_is_the_same_with_the_same_one(
    method: str, images: dict[str, Images]
) -> None:
    spec, broadcast = drafted(method)

    def leaving(secret: str) -> Arrays:
        node = Participant(spec, "plant-a", images["plant-a"], secret=secret * 64)
        return node.contribute(node.start(broadcast), broadcast, 1)[1].tensors

    first, again, other = leaving("a"), leaving("a"), leaving("b")
    assert all(np.array_equal(first[name], again[name]) for name in first)
    public = {"statistics.plants", "statistics.centre"}
    trained = {
        name for name in first if not np.array_equal(first[name], broadcast.get(name))
    } - public
    assert trained
    # Adam's first step only knows signs, which a few numbers may have in common.
    assert not any(
        np.array_equal(first[name], other[name])
        for name in trained
        if first[name].size > 60 or method == "gaussian"
    )


def test_a_round_that_is_made_again_from_another_broadcast_has_other_noise_and_is_counted(
    images: dict[str, Images],
) -> None:
    """As where a coordinator went back: a difference of both must not show what the noise hides."""
    spec, broadcast = drafted("gaussian")
    account = Account()
    node = Participant(spec, "plant-a", images["plant-a"], secret="a" * 64, account=account)
    first = node.contribute(State({}, {}), broadcast, 1)[1].tensors["statistics.images"]
    once = account.epsilon
    node.contribute(State({}, {}), broadcast, 1)
    assert account.epsilon == once
    other = {**broadcast, **initial_encoder("small", "none", 1)}
    second = node.contribute(State({}, {}), other, 1)[1].tensors["statistics.images"]
    assert account.epsilon > once * 1.3
    assert (np.abs(first - second) * 2.0**-18).max() > 1e-3, "of the same images"
    later = Participant(
        msgspec.structs.replace(spec, run="0" * 16),
        "plant-a",
        images["plant-a"],
        secret="a" * 64,
        account=account,
    )
    twice = account.epsilon
    third = later.contribute(State({}, {}), broadcast, 1)[1].tensors["statistics.images"]
    assert account.epsilon > twice * 1.2
    assert (np.abs(first - third) * 2.0**-18).max() > 1e-3, "of the same sums, in another run"


@pytest.mark.parametrize("method", METHODS)
def test_under_any_other_spec_of_the_same_run_the_noise_is_another_and_is_counted(
    method: str, images: dict[str, Images]
) -> None:
    """Else a coordinator that asks for the same at two deviations could compute what they hide."""
    spec, broadcast = drafted(method)
    account = Account()
    seen = {}
    for other in [spec, *(each for _, each in changed(spec))]:
        # one that no node could follow tells nothing
        with contextlib.suppress(Exception):
            node = Participant(other, "plant-a", images["plant-a"], "cpu", "a" * 64, (), account)
            node.contribute(node.start(broadcast), broadcast, 1)
            views = node.seed(1, node.method.train[0]) if node.method.train else len(seen)
            seen[node._basis] = views
    assert len(seen) > 8
    assert len({*seen.values()}) == len(seen) <= len(account._releases)


def test_other_bytes_of_the_same_release_never_leave(images: dict[str, Images]) -> None:
    spec, broadcast = drafted("gaussian")
    node = Participant(spec, "plant-a", images["plant-a"], secret="a" * 64, account=Account())
    node.contribute(State({}, {}), broadcast, 1)
    node.confirm(1, "0" * 64)
    node.confirm(1, "0" * 64)
    with pytest.raises(EdgeNodeError):
        node.confirm(1, "1" * 64)


def test_views_of_images_are_drawn_by_the_secret_and_elsewhere_by_the_public_seed(
    images: dict[str, Images],
) -> None:
    """An image that is replaced has all others change places,
    and with known views what each of them adds.
    """

    def seed(secret: str, epsilon: str = "") -> int:
        spec, _ = drafted("fedavg", privacy={"epsilon": epsilon} if epsilon else {})
        node = Participant(spec, "plant-a", images["plant-a"], secret=secret * 64)
        return node.seed(1, node.method.train[0])

    assert seed("a", "8") == seed("a", "8") != seed("b", "8")
    assert seed("a") == seed("b")


@pytest.mark.parametrize("method", ["fedavg", "gaussian"])
def test_a_process_that_was_killed_before_it_had_contributed_makes_the_same_bytes(
    method: str, images: dict[str, Images], tmp_path: Path
) -> None:
    """All that is left of the first one is what was on disk before it began to train."""
    spec, broadcast = drafted(method)

    def contributed(folder: Path) -> str:
        inbox: queue.Queue[object] = queue.Queue()
        worker = Worker(spec, "plant-a", images["plant-a"], folder, inbox)
        digest, size = worker.store.put(encode_tensors(broadcast))
        worker.train(
            Manifest(
                federation="steel",
                run=spec.run,
                round=1,
                node="coordinator",
                digest=digest,
                size=size,
                chunk_size=1024,
            ),
            counted=False,
        )
        made = heard(inbox)
        assert isinstance(made, Contributed), made
        assert isinstance(heard(inbox), Refined)
        worker.close()
        assert made.progress.blob
        return made.progress.blob.digest

    first = contributed(tmp_path / "first")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "first" / "privacy.json", tmp_path / "again")
    assert contributed(tmp_path / "again") == first
    accounts = [open_account(tmp_path / name).account.epsilon for name in ("first", "again")]
    assert accounts[0] == accounts[1] > 0
    assert contributed(tmp_path / "with another secret") != first
    for file in (tmp_path / "first").glob("privacy*"):
        file.unlink()
    with pytest.raises(EdgeNodeError, match=spec.run):
        Worker(spec, "plant-a", images["plant-a"], tmp_path / "first", queue.Queue())


@pytest.mark.parametrize(
    ("method", "encoder"),
    [
        *((method, "small") for method in METHODS),
        pytest.param("gaussian", "efficientnet_lite0_mid", marks=pytest.mark.slow),
    ],
)
def test_everybody_has_spent_what_was_planned_and_the_model_says_so(
    method: str, encoder: str, images: dict[str, Images]
) -> None:
    spec, broadcast = drafted(method, model=encoder)
    models = simulate(spec, broadcast, images).models
    for model in models.values():
        spent = model.metadata.privacy
        assert spent is not None
        assert spent.settings == spec.privacy
        assert spent.epsilon == pytest.approx(planned_epsilon(spec))
        assert spent.epsilon <= 8
        epsilons = [line["epsilon"] for line in model.metadata.history]
        assert epsilons == sorted(epsilons)
        assert epsilons[-1] == spent.epsilon
    assert (
        simulate(drafted(method, model=encoder, privacy={})[0], broadcast, images)
        .models["plant-a"]
        .metadata.privacy
        is None
    )


def test_with_hardly_any_noise_sums_make_the_model_that_others_images_make(
    images: dict[str, Images],
) -> None:
    models = [
        simulate(*drafted("gaussian", epsilon), images).models["plant-a"]
        for epsilon in ("1e9", "1e8", "0.1")
    ]
    weights = [to_arrays(model.tensors)["classifier.weight"] for model in models]
    assert np.corrcoef(weights[0].ravel(), weights[1].ravel())[0, 1] > 0.99
    assert np.corrcoef(weights[0].ravel(), weights[2].ravel())[0, 1] < 0.99


@pytest.mark.slow
def test_with_hardly_any_noise_training_learns_and_with_much_it_does_not(
    images: dict[str, Images],
) -> None:
    losses = []
    for epsilon in ("1e7", "0.5"):
        spec, broadcast = drafted(
            "fedavg", epsilon, rounds=5, training={"batch_norm": "eval", "local_epochs": 2}
        )
        history = simulate(spec, broadcast, images).models["plant-a"].metadata.history
        losses.append([line["L_C"] for line in history])
    assert losses[0][-1] < losses[0][0] - 0.2
    assert losses[1][-1] > losses[0][-1] + 0.2


def test_a_plant_without_images_makes_its_model_of_the_totals_and_spends_nothing(
    images: dict[str, Images],
) -> None:
    spec, broadcast = drafted("gaussian", "1e6")
    result = simulate(spec, broadcast, images).broadcast
    newcomer = Participant(spec, "plant-c", Images.none(32))
    state = newcomer.with_statistics(State({}, {}), result)
    model = conclude(newcomer, state, 1, result, result, (), None, counted=False)
    assert model.metadata.privacy is not None
    assert model.metadata.privacy.epsilon == 0
    assert np.abs(to_arrays(model.tensors)["classifier.weight"]).max() > 0


@pytest.mark.slow
def test_a_node_that_is_killed_says_the_same_again_and_board_report_and_bundle_tell_one_epsilon(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Two processes over a real broker; one is killed as soon as its account has a round,
    and started again.
    """
    states = {name: tmp_path / name for name in folders}
    training = ("--training", "batch_norm=eval", "--training", "local_epochs=30")

    def join(name: str, log: str) -> Any:
        return start(
            "join",
            broker.url,
            "--name",
            name,
            "--data",
            folders[name],
            "--state",
            states[name],
            "--demand",
            "epsilon=5",
            "--json",
            log=tmp_path / log,
        )

    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        coordinator = start(
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--state",
            tmp_path / "coordinator",
            "--method",
            "fedavg",
            "--model",
            "small",
            "--size",
            32,
            "--weights",
            drawn_weights(),
            "--rounds",
            2,
            "--seed",
            7,
            "--aggregate",
            "mean",
            "--codec",
            "none",
            "--privacy",
            "epsilon=5",
            *training,
            log=tmp_path / "coordinator.log",
        )
        nodes = {name: join(name, f"{name}.log") for name in folders}
        try:
            wait_for(states["plant-b"] / "privacy.json", '"round":1')
            nodes["plant-b"].send_signal(signal.SIGKILL)
            nodes["plant-b"].wait(60)
            assert not list(states["plant-b"].glob("progress*")), "it had not contributed yet"
            nodes["plant-b"] = join("plant-b", "again.log")
            assert [process.wait(120) for process in (coordinator, *nodes.values())] == [0, 0, 0]
        finally:
            for process in (coordinator, *nodes.values()):
                process.kill()
    wait_for(
        tmp_path / "coordinator.log",
        "this federation is private: what leaves a node spends epsilon 5 ",
    )
    spec = newest_run(tmp_path / "coordinator").spec
    _, broadcast = draft(
        Request("fedavg", model="small", weights=str(drawn_weights()), size=32, seed=7),
        federation="x",
        classes=CLASSES,
        nodes=2,
    )
    secrets = {name: open_account(state).secret for name, state in states.items()}
    images = {name: load_images(spec, folder) for name, folder in folders.items()}
    simulated = simulate(spec, broadcast, images, secrets=secrets).broadcast
    learnt = load_file(tmp_path / "coordinator" / "global.safetensors")
    assert {name: value.tobytes() for name, value in learnt.items()} == {
        n: v.tobytes() for n, v in simulated.items()
    }
    for name, state in states.items():
        log = tmp_path / ("again.log" if name == "plant-b" else f"{name}.log")
        events = [json.loads(line) for line in log.read_text().splitlines()]
        told = [each["metrics"]["epsilon"] for each in events if each["event"] == "Measured"]
        spent = load_metadata(state / "model").privacy
        assert spent is not None
        assert told[-1] == spent.epsilon == pytest.approx(planned_epsilon(spec))
        said = f"spent epsilon {spent.epsilon:.3g} of each training image, at delta 1e-05"
        assert any(said in each.get("text", "") for each in events)
        assert open_account(state).account.epsilon == spent.epsilon
    assert here("report", states["plant-a"]).returncode == 0
    page = re.sub(r"\s+", " ", (states["plant-a"] / "report.html").read_text())
    assert said in page
    assert "epsilon spent" in page
    exported = here("export", states["plant-a"] / "model", "--out", tmp_path / "bundles")
    assert exported.returncode == 0, exported.stderr
    bundle = read_bundle(tmp_path / "bundles" / "plant-a")
    assert bundle.manifest.provenance
    assert bundle.manifest.provenance.privacy == load_metadata(states["plant-a"] / "model").privacy
    assert msgspec.json.encode(bundle.manifest.provenance.privacy)
