"""Kits in use: a federation of real processes that trust neither the broker nor each other's
word for who they are.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import BrokerError
from broker_config.security import kit as kits
from broker_config.security.message_signing import MessageSigner, verify_broadcast
from broker_config.security.provisioning import kits as made_here
from broker_config.security.signing import SigningKey
from tests.support import provisioned_federation
from tests.support.enrolled_members import Administration, Plant
from tests.support.plants import CLASSES, FEDERATION, draw, here, run, start
from tests.support.ports import free_port
from tests.support.terminal import Terminal
from tests.support.threaded_federation import PLANTS, Federation
from tests.support.waiting import wait_until
from trainer import progress
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.journal import history, newest_run
from trainer.federation.server.spec import Participation
from trainer.training.personal_model import load_metadata

NODES = ("plant-a", "plant-b")
SECRET = kits.PASSPHRASE


@pytest.fixture(scope="module")
def guarded() -> Iterator[provisioned_federation.Guarded]:
    """Outside pytest's folder, where mosquitto's user cannot look."""
    with (
        tempfile.TemporaryDirectory() as folder,
        provisioned_federation.guarded(Path(folder), nodes=NODES) as broker,
    ):
        yield broker


def kit(broker: provisioned_federation.Guarded, name: str) -> Path:
    return broker.folder / "kits" / f"{name}.kit"


@pytest.mark.slow
def test_a_kit_and_images_are_all_that_a_node_needs(
    guarded: provisioned_federation.Guarded, tmp_path: Path
) -> None:
    """Behind mosquitto's generated configuration; the models can show what they were made from."""
    processes = {
        "coordinator": start(
            "coordinate",
            "--kit",
            kit(guarded, "coordinator"),
            "--classes",
            ",".join(CLASSES),
            *FEDERATION,
            "--state",
            tmp_path / "coordinator",
            log=tmp_path / "coordinator.log",
            anew=True,
            **{SECRET: guarded.members.passphrase("coordinator")},
        ),
    }
    for seed, name in enumerate(NODES):
        images = draw(tmp_path / "images" / name, 8, seed)
        processes[name] = start(
            "join",
            "--kit",
            kit(guarded, name),
            "--data",
            images,
            "--state",
            tmp_path / name,
            log=tmp_path / f"{name}.log",
            anew=True,
            **{SECRET: guarded.members.passphrase(name)},
        )
    try:
        codes = {name: process.wait(120) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    logs = "\n".join(f"== {name}\n{(tmp_path / f'{name}.log').read_text()}" for name in processes)
    assert set(codes.values()) == {0}, logs
    for name in NODES:
        metadata = load_metadata(model := tmp_path / name / "model")
        next_step = f"next: edge-node export {model} --out bundles --kit {kit(guarded, name)}"
        assert next_step in (tmp_path / f"{name}.log").read_text()
        assert metadata.broadcast is not None
        verify_broadcast(metadata.broadcast, guarded.kits[name].members().coordinator.key)
    assert newest_run(tmp_path / "coordinator").spec.encryption == "group"
    shown = run(
        "status",
        "--kit",
        kit(guarded, "monitor"),
        "--json",
        "--once",
        **{SECRET: guarded.members.passphrase("monitor")},
    )
    assert json.loads(shown.stdout)["status"] == "finished", shown
    assert "ignored" not in logs


@pytest.mark.slow
def test_with_kits_messages_are_encrypted_but_in_a_run_that_has_begun_otherwise(
    guarded: provisioned_federation.Guarded, tmp_path: Path
) -> None:
    """Nobody need name it to go on with a run of an earlier version."""
    state, log = tmp_path / "coordinator", tmp_path / "log"
    for flags, expected in (
        (["--encryption", "none"], "none"),
        ([], "none"),
        (["--new"], "group"),
        ([], "group"),
    ):
        process = start(
            "coordinate",
            "--kit",
            kit(guarded, "coordinator"),
            "--classes",
            ",".join(CLASSES),
            *FEDERATION,
            *flags,
            "--state",
            state,
            log=log,
            anew=True,
            **{SECRET: guarded.members.passphrase("coordinator")},
        )
        try:
            wait_until(lambda: "waiting for" in log.read_text(), said=log.read_text)
            process.terminate()
            assert process.wait(60) == 130
        finally:
            process.kill()
        assert newest_run(state).spec.encryption == expected


def test_without_kits_what_must_be_encrypted_is_refused(tmp_path: Path) -> None:
    with start_broker(tmp_path / "broker") as broker:
        done = here(
            "coordinate",
            broker.url,
            "--classes",
            "a,b",
            *FEDERATION,
            "--nodes",
            "2",
            "--encryption",
            "group",
            "--state",
            tmp_path / "state",
        )
    assert done.returncode == 2
    assert "each has a kit" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("coordinate", "--kit", "plant-a", "--classes", "a,b"), "this kit is that of plant-a"),
        (
            ("join", "--kit", "plant-a", "--data", ".", "--name", "plant-b"),
            "the kit is for name 'plant-a'",
        ),
        (
            ("join", "--kit", "plant-a", "--data", ".", "--federation", "x"),
            "the kit is for federation 'steel'",
        ),
        (
            ("join", "--kit", "plant-a", "--data", ".", "--ca", "ca.pem"),
            "holds certificates and key already",
        ),
        (
            ("join", "mqtt://127.0.0.1", "--kit", "plant-a", "--data", "."),
            "use mqtts:// or wss://, or no URL",
        ),
        (("join", "--data", "."), "the broker's address is missing"),
        (("join", "mqtt://127.0.0.1", "--data", "."), "this node's name is missing"),
        (("coordinate", "mqtt://127.0.0.1", "--classes", "a,b"), "the number of nodes is missing"),
    ],
)
def test_what_contradicts_a_kit_or_is_missing_without_one_is_said(
    guarded: provisioned_federation.Guarded,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET, guarded.members.passphrase("plant-a"))
    words = [str(kit(guarded, "plant-a")) if word == "plant-a" else word for word in arguments]
    done = here(*words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("known", [True, False])
def test_a_passphrase_is_asked_for_up_to_three_times_and_a_kit_that_others_can_read_is_remarked_on(
    known: bool, guarded: provisioned_federation.Guarded, tmp_path: Path
) -> None:
    path = shutil.copy(kit(guarded, "monitor"), tmp_path / "monitor.kit")
    path.chmod(0o644)
    terminal = Terminal(200, "status", "--kit", path, "--federation", "nothing", "--once")
    last = guarded.members.passphrase("monitor").upper() if known else "wrong again"
    for asked, answer in enumerate(("wrong", "wrong as well", last), start=1):
        terminal.read_until(f"(?s)(passphrase of .*){{{asked}}}")
        terminal.type(answer)
    assert terminal.read_to_end() == 2
    assert "chmod 600" in terminal.text
    said = (
        "the kit is for federation 'steel', not 'nothing'"
        if known
        else "edge-node: the passphrase does not open"
    )
    assert said in terminal.text, terminal.text


@contextmanager
def enrolled(
    folder: Path,
) -> Iterator[tuple[Administration, dict[str, Plant], provisioned_federation.Guarded]]:
    """The administration of steel, three plants that have made their own keys,
    and mosquitto for them.
    """
    plants = {name: Plant(folder, name) for name in PLANTS}
    with tempfile.TemporaryDirectory() as passable:
        Path(passable).chmod(0o711)
        operator = Administration(Path(passable) / "steel")
        registry = operator.found(*plants.values(), port=free_port())
        made = {each.name: each for each in made_here(registry)}
        broker = provisioned_federation.Guarded(
            provisioned_federation.Members(operator.folder, registry, made)
        )
        try:
            broker.start()
            yield operator, plants, broker
        finally:
            broker.stop()


@pytest.mark.slow
def test_plants_learn_together_with_keys_that_never_left_them(tmp_path: Path) -> None:
    """Request, answer and kit are the commands' own; so is the passphrase's place."""
    with enrolled(tmp_path) as (operator, plants, broker):
        processes = {
            "coordinator": start(
                "coordinate",
                "--kit",
                kit(broker, "coordinator"),
                "--classes",
                ",".join(CLASSES),
                *FEDERATION,
                "--state",
                tmp_path / "coordinator",
                log=tmp_path / "coordinator.log",
                anew=True,
                **{SECRET: broker.members.passphrase("coordinator")},
            ),
        }
        for seed, (name, plant) in enumerate(plants.items()):
            place = plant.place
            done = here(
                "request", "steel", name, "--out", place.folder, "--accept", operator.answer(name)
            )
            assert done.returncode == 0, done.stderr
            processes[name] = start(
                "join",
                "--kit",
                place.kit,
                "--data",
                draw(tmp_path / "images" / name, 8, seed),
                "--state",
                tmp_path / name,
                log=tmp_path / f"{name}.log",
                anew=True,
                CREDENTIALS_DIRECTORY=str(place.folder),
            )
        try:
            codes = {name: process.wait(120) for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
    logs = "\n".join(f"== {name}\n{(tmp_path / f'{name}.log').read_text()}" for name in processes)
    assert set(codes.values()) == {0}, logs
    listing = history(tmp_path / "coordinator")
    assert [set(line.weights) for line in listing] == [{*PLANTS}] * 2


@pytest.mark.slow
def test_in_a_run_one_is_renewed_one_gets_new_keys_for_lost_ones_and_one_is_revoked(
    tmp_path: Path,
) -> None:
    """The first two keep their names and their part of the run;
    what was revoked is refused by broker and members.
    """
    images = {name: draw(tmp_path / "images" / name, 8, seed) for seed, name in enumerate(PLANTS)}
    with enrolled(tmp_path) as (operator, plants, broker):
        endpoints, signers = dict[str, Endpoint](), dict[str, MessageSigner]()

        def use(its: kits.Kit) -> None:
            endpoints[its.name], signers[its.name] = Endpoint.from_kit(its), MessageSigner(its)

        for its in (
            broker.kits["coordinator"],
            *(plants[name].accept(operator.answer(name)) for name in PLANTS),
        ):
            use(its)
        old = {name: endpoints[name].kit for name in PLANTS}
        run = Federation(endpoints, images, tmp_path, "steel", 40, Participation(), signers=signers)
        coordinator, nodes = run.coordinator(), {name: run.node(name) for name in PLANTS}
        coordinator.wait_for(progress.RoundClosed)

        operator.provision(renew=["plant-a"])
        use(plants["plant-a"].accept(operator.answer("plant-a")))
        nodes["plant-a"].stop()
        nodes["plant-a"] = run.node("plant-a")
        coordinator.wait_for(progress.RoundClosed)

        for name in ("plant-b", "plant-c"):
            nodes[name].stop()
        coordinator.stop()
        between = len(run.contributors())
        assert between >= 2
        again = Plant(tmp_path / "new", "plant-b")
        registry = operator.provision(again, revoke=["plant-b", "plant-c"])
        broker.restart()
        use(next(each for each in made_here(registry) if each.name == "coordinator"))
        use(again.accept(operator.answer("plant-b")))
        coordinator, nodes["plant-b"] = run.coordinator(), run.node("plant-b")
        for name in ("plant-b", "plant-c"):
            its = old[name]
            assert its
            with pytest.raises(BrokerError, match="revoked"):
                MqttClient(Endpoint.from_kit(its), "x", inbox=Queue(), persistent=False).open()
        assert isinstance(coordinator.end(), Outcome)
        for name in ("plant-a", "plant-b"):
            assert nodes[name].end(), "its model"
    assert run.contributors()[:between] == [{*PLANTS}] * between
    assert run.contributors()[between:] == [{"plant-a", "plant-b"}] * (40 - between)
    members = signers["coordinator"].members
    assert members.key("plant-c") is None
    assert members.key("plant-b") == SigningKey(endpoints["plant-b"].kit.signing).public  # type: ignore[union-attr]
