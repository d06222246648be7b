"""Passwords, passphrases and private keys stay where they belong: not in logs, state folders, arguments or children."""

import base64
import os
import secrets
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from broker_config import charter, kit
from broker_config.charter import Charter, Member
from broker_config.environment import PASSPHRASE, PASSWORD
from broker_config.signing import SigningKey
from tests.conftest import Secured
from tests.plants import CLASSES, FEDERATION, draw, run, start

pytestmark = pytest.mark.usefixtures("usual_umask")


@pytest.fixture(scope="module")
def usual_umask() -> Iterator[None]:
    """Others may read what is made without thinking of them."""
    before = os.umask(0o022)
    yield
    os.umask(before)


class Trial(NamedTuple):
    """Commands that have run with secrets, all of which end up in `hidden`."""

    folder: Path  # what they left, and `*.log`: what they said
    said: dict[str, str]  # by command, standard output and standard error
    hidden: dict[str, bytes]  # by name


def make_kits(folder: Path, broker: Secured, passphrase: str) -> dict[str, bytes]:
    """Kits of a federation `plant` with one node; return their secrets by name."""
    authority, keys = SigningKey.generate(), {name: SigningKey.generate() for name in ("coordinator", "plant-a")}
    later = datetime.now(UTC) + timedelta(days=30)
    members = {name: Member(key=key.public, expires=later) for name, key in keys.items()}
    belonging = Charter(
        federation="plant", version=1, issued=datetime.now(UTC), expires=later, coordinator=members["coordinator"],
        nodes={"plant-a": members["plant-a"]},
    )  # fmt: skip
    hidden = {}
    for name, key in keys.items():
        certificate, private = broker.authority.issue(name)
        opened = kit.Kit(
            federation="plant", name=name, broker=f"mqtts://127.0.0.1:{broker.mutual}", authority=authority.public,
            charter=charter.seal(belonging, authority), ca=broker.authority.ca.read_text(),
            certificate=certificate.read_text(), key=private.read_text(), signing=key.raw,
        )  # fmt: skip
        kit.write(folder / f"{name}.kit", opened, passphrase)
        hidden[f"certificate's key of {name}"] = private.read_bytes().splitlines()[1]
        hidden[f"signing key of {name}"] = key.raw
        hidden[f"signing key of {name}, hexadecimal"] = key.raw.hex().encode()
        hidden[f"signing key of {name}, base64"] = base64.b64encode(key.raw)
    return hidden


@pytest.fixture(scope="module")
def trial(secured: Secured, tmp_path_factory: pytest.TempPathFactory, usual_umask: None) -> Trial:
    """A federation with kits, and commands that succeed and fail with kits and passwords, all with --debug."""
    folder = tmp_path_factory.mktemp("trial")
    password, phrase = secrets.token_hex(12), kit.new_passphrase()
    hidden = make_kits(folder, secured, phrase) | {"password": password.encode(), "passphrase": phrase.encode()}
    images = draw(tmp_path_factory.mktemp("images") / "plant-a", 8, seed=1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PASSPHRASE, phrase)
        environment.setenv(PASSWORD, password)
        coordinator, node = (
            ("--debug", what, "--kit", folder / f"{who}.kit", "--state", folder / who)
            for what, who in (("coordinate", "coordinator"), ("join", "plant-a"))
        )
        federation = ("--classes", ",".join(CLASSES), "--nodes", 1, *FEDERATION, "--rounds", 1)
        learning = {
            "coordinate": start(*coordinator, *federation, log=folder / "coordinate.log"),
            "join": start(*node, "--data", images, log=folder / "join.log"),
        }
        ends = {name: process.wait(100) for name, process in learning.items()}
        done = {
            "let in": run("--debug", "status", f"mqtts://anna@127.0.0.1:{secured.tls}", "--ca", secured.authority.ca),
            "refused": run("--debug", "status", f"mqtt://anna:{password}@127.0.0.1:{secured.closed}"),
            "wrong passphrase": run("--debug", "status", "--kit", folder / "plant-a.kit", **{PASSPHRASE: password}),
        }
    said = {name: result.stdout + result.stderr for name, result in done.items()}
    assert ends == {"coordinate": 0, "join": 0}, [path.read_text() for path in folder.glob("*.log")]
    assert {name for name, result in done.items() if result.returncode == 0} == {"let in"}, said
    (folder / "broker.log").write_bytes((secured.authority.ca.parent / "log").read_bytes())
    return Trial(folder, said, hidden)


def leaks(data: bytes, hidden: dict[str, bytes]) -> list[str]:
    return [name for name, secret in hidden.items() if secret in data]


def test_no_secret_is_said_not_even_with_a_traceback(trial: Trial):
    assert {name: found for name, text in trial.said.items() if (found := leaks(text.encode(), trial.hidden))} == {}
    assert "Traceback" in trial.said["refused"]


def test_no_secret_is_left_in_logs_state_folders_journals_or_kits(trial: Trial):
    files = [path for path in trial.folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"journal.sqlite", "personal.safetensors", "coordinate.log", "broker.log", "plant-a.kit"} <= names
    assert {str(path): found for path in files if (found := leaks(path.read_bytes(), trial.hidden))} == {}


def test_what_leaks_is_found(trial: Trial):
    for name, secret in trial.hidden.items():
        assert leaks(b"before " + secret + b" after", trial.hidden) == [name]


def test_state_folders_and_kits_are_their_owners_alone(trial: Trial):
    modes = {name: stat.S_IMODE((trial.folder / name).stat().st_mode) for name in ("coordinator", "plant-a")}
    assert modes == {"coordinator": 0o700, "plant-a": 0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in trial.folder.glob("*.kit")} == {0o600}


def test_a_broker_that_we_start_gets_no_secret_of_ours(tmp_path: Path):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PASSPHRASE, "opens a kit")
        environment.setenv(PASSWORD, "opens a broker")
        process = start("broker", "--port", 0, log=tmp_path / "broker.log")
    ours, deadline = psutil.Process(process.pid), time.monotonic() + 60
    try:
        while len(children := ours.children(recursive=True)) < 2:  # the keeper and mosquitto
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert {PASSWORD, PASSPHRASE} <= ours.environ().keys()
        assert [each.name() for each in children if {PASSWORD, PASSPHRASE} & each.environ().keys()] == []
        assert not any("opens a" in argument for each in (ours, *children) for argument in each.cmdline())
    finally:
        process.terminate()
        process.wait(20)
