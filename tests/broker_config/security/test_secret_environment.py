"""Passwords, passphrases and private keys stay where they belong: not in logs,
state folders, arguments or children.
"""

import base64
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from broker_config.security.kit import Kit
from broker_config.security.secret_environment import PASSPHRASE, PASSWORD
from tests.support import provisioned_federation
from tests.support.plants import CLASSES, FEDERATION, draw, run, start
from tests.support.secured_mosquitto import Secured
from tests.support.waiting import wait_until

SHARED = ("coordinator", "plant-a")


class Trial(NamedTuple):
    """Commands that have run with secrets, all of which end up in `hidden`."""

    folder: Path  # what they left, and `*.log`: what they said
    said: dict[str, str]  # by command, standard output and standard error
    hidden: dict[str, bytes]  # by name


def secrets_of(kit: Kit) -> dict[str, bytes]:
    """In every form in which one might be written."""
    forms = {
        "raw": kit.signing,
        "hexadecimal": kit.signing.hex().encode(),
        "base64": base64.b64encode(kit.signing),
    }
    hidden = {f"signing key of {kit.name}, {form}": value for form, value in forms.items()}
    return hidden | {f"certificate's key of {kit.name}": kit.key.encode().splitlines()[1]}


@pytest.fixture(scope="module")
def trial(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A federation with kits, and commands that succeed and fail with kits and passwords,
    all with --debug.
    """
    folder, password = tmp_path_factory.mktemp("trial"), secrets.token_hex(12)
    images = draw(tmp_path_factory.mktemp("images") / "plant-a", 8, seed=1)
    umask = os.umask(0o022)  # the usual one: others may read what is made without a thought of them
    with (
        tempfile.TemporaryDirectory() as place,
        provisioned_federation.guarded(Path(place), nodes=SHARED[1:]) as broker,
    ):
        phrases = {name: broker.members.passphrase(name) for name in SHARED}
        hidden = {"password": password.encode()} | {
            f"passphrase of {who}": each.encode() for who, each in phrases.items()
        }
        for name in SHARED:
            hidden |= secrets_of(broker.kits[name])
            (folder / f"{name}.kit").write_bytes(
                (broker.folder / "kits" / f"{name}.kit").read_bytes()
            )
        flags = {who: ("--kit", folder / f"{who}.kit", "--state", folder / who) for who in SHARED}
        federation = ("--classes", ",".join(CLASSES), *FEDERATION, "--rounds", 1)
        learning = {
            "coordinator": ("coordinate", *flags["coordinator"], *federation),
            "plant-a": ("join", *flags["plant-a"], "--data", images),
        }
        processes = [
            start(
                "--debug",
                *words,
                log=folder / f"{who}.log",
                **{PASSPHRASE: phrases[who], PASSWORD: password},
            )
            for who, words in learning.items()
        ]
        ends = [process.wait(100) for process in processes]
        known = {PASSWORD: password, PASSPHRASE: password}
        done = {
            "let in": run(
                "--debug",
                "status",
                f"mqtts://a@127.0.0.1:{secured.tls}",
                "--ca",
                secured.authority.ca,
                **known,
            ),
            "refused": run(
                "--debug", "status", f"mqtt://a:{password}@127.0.0.1:{secured.closed}", **known
            ),
            "wrong passphrase": run("--debug", "status", "--kit", folder / "plant-a.kit", **known),
        }
        (folder / "broker.log").write_bytes(broker.log.read_bytes())
    os.umask(umask)
    said = {name: result.stdout + result.stderr for name, result in done.items()}
    assert ends == [0, 0], [path.read_text() for path in folder.glob("*.log")]
    ended = {
        "let in": "there is no federation",
        "refused": "BrokerError",
        "wrong passphrase": "does not open",
    }
    assert [name for name, words in ended.items() if words not in said[name]] == [], said
    return Trial(folder, said, hidden)


def leaks(data: bytes, hidden: dict[str, bytes]) -> list[str]:
    return [name for name, secret in hidden.items() if secret in data]


@pytest.mark.slow
def test_no_secret_is_said_not_even_with_a_traceback(trial: Trial):
    assert {
        name: found
        for name, text in trial.said.items()
        if (found := leaks(text.encode(), trial.hidden))
    } == {}
    assert "Traceback" in trial.said["refused"]


@pytest.mark.slow
def test_no_secret_is_left_in_logs_state_folders_journals_or_kits(trial: Trial):
    files = [path for path in trial.folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {
        "journal.sqlite",
        "personal.safetensors",
        "coordinator.log",
        "broker.log",
        "plant-a.kit",
    } <= names
    assert {
        str(path): found for path in files if (found := leaks(path.read_bytes(), trial.hidden))
    } == {}


def test_what_leaks_is_found(trial: Trial):
    for name, secret in trial.hidden.items():
        assert leaks(b"before " + secret + b" after", trial.hidden) == [name]


def test_state_folders_are_their_owners_alone(trial: Trial):
    assert {
        name: stat.S_IMODE((trial.folder / name).stat().st_mode) for name in SHARED
    } == dict.fromkeys(SHARED, 0o700)


def test_a_broker_that_we_start_gets_no_secret_of_ours(tmp_path: Path):
    process = start(
        "broker",
        "--port",
        0,
        "--folder",
        tmp_path / "broker",
        log=tmp_path / "log",
        **{PASSPHRASE: "opens a kit", PASSWORD: "opens a door"},
    )
    ours = psutil.Process(process.pid)
    try:
        wait_until(lambda: len(ours.children(recursive=True)) >= 2)  # the supervisor and mosquitto
        children = ours.children(recursive=True)
        assert {PASSWORD, PASSPHRASE} <= ours.environ().keys()
        assert [
            each.name() for each in children if {PASSWORD, PASSPHRASE} & each.environ().keys()
        ] == []
        assert not any(
            "opens a" in argument for each in (ours, *children) for argument in each.cmdline()
        )
    finally:
        process.terminate()
        process.wait(60)
