"""Kits in use: a federation of real processes that trust neither the broker nor each other's word for who they are."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.security import kit as kits
from broker_config.security.message_signing import verify_broadcast
from tests.support import provisioned_federation
from tests.support.plants import CLASSES, FEDERATION, draw, here, run, start
from tests.support.terminal import Terminal
from trainer.training.personal_model import load_metadata

NODES = ("plant-a", "plant-b")
SECRET = kits.PASSPHRASE


@pytest.fixture(scope="module")
def guarded() -> Iterator[provisioned_federation.Guarded]:
    """Outside pytest's folder, where mosquitto's user cannot look."""
    with tempfile.TemporaryDirectory() as folder, provisioned_federation.guarded(Path(folder), nodes=NODES) as broker:
        yield broker


def kit(broker: provisioned_federation.Guarded, name: str) -> Path:
    return broker.folder / "kits" / f"{name}.kit"


@pytest.mark.slow
def test_a_kit_and_images_are_all_that_a_node_needs(guarded: provisioned_federation.Guarded, tmp_path: Path) -> None:
    """Behind mosquitto's generated configuration; the models can show what they were made from."""
    processes = {
        "coordinator": start(
            "coordinate", "--kit", kit(guarded, "coordinator"), "--classes", ",".join(CLASSES), *FEDERATION,
            "--state", tmp_path / "coordinator", log=tmp_path / "coordinator.log", anew=True,
            **{SECRET: guarded.members.passphrase("coordinator")},
        ),
    }  # fmt: skip
    for seed, name in enumerate(NODES):
        images = draw(tmp_path / "images" / name, 8, seed)
        processes[name] = start(
            "join", "--kit", kit(guarded, name), "--data", images, "--state", tmp_path / name,
            log=tmp_path / f"{name}.log", anew=True, **{SECRET: guarded.members.passphrase(name)},
        )  # fmt: skip
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
    shown = run("status", "--kit", kit(guarded, "monitor"), "--json", "--once",
                **{SECRET: guarded.members.passphrase("monitor")})  # fmt: skip
    assert json.loads(shown.stdout)["status"] == "finished", shown
    assert "ignored" not in logs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("coordinate", "--kit", "plant-a", "--classes", "a,b"), "this kit is that of plant-a"),
        (("join", "--kit", "plant-a", "--data", ".", "--name", "plant-b"), "the kit is for name 'plant-a'"),
        (("join", "--kit", "plant-a", "--data", ".", "--federation", "x"), "the kit is for federation 'steel'"),
        (("join", "--kit", "plant-a", "--data", ".", "--ca", "ca.pem"), "holds certificates and key already"),
        (("join", "mqtt://127.0.0.1", "--kit", "plant-a", "--data", "."), "use mqtts:// or wss://, or no URL"),
        (("join", "--data", "."), "the broker's address is missing"),
        (("join", "mqtt://127.0.0.1", "--data", "."), "this node's name is missing"),
        (("coordinate", "mqtt://127.0.0.1", "--classes", "a,b"), "the number of nodes is missing"),
    ],
)
def test_what_contradicts_a_kit_or_is_missing_without_one_is_said(
    guarded: provisioned_federation.Guarded, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
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
    assert "can be read by others: chmod 600" in terminal.text
    said = "the kit is for federation 'steel', not 'nothing'" if known else "edge-node: the passphrase does not open"
    assert said in terminal.text, terminal.text
