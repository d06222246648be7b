"""`edge-node vfl coordinate` and `join` as processes: what they say before they begin."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.plants import here

NOWHERE = "mqtt://127.0.0.1:1"


@pytest.mark.parametrize("fault", ["a file", "below a file", "full"])
@pytest.mark.parametrize(
    "command",
    [
        (
            "vfl",
            "coordinate",
            NOWHERE,
            "--sensors",
            "press",
            "--labels",
            "none.csv",
            "--classes",
            "a,b",
            "--state",
        ),
        (
            "vfl",
            "join",
            NOWHERE,
            "--sensor",
            "press",
            "--columns",
            "force",
            "--data",
            "none.csv",
            "--state",
        ),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_state_folder_that_cannot_be_used_is_named_before_anything_else(
    command: tuple[str, ...], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the broker is asked, and files are read."""
    state = tmp_path / "state"
    if fault == "full":
        monkeypatch.setattr(
            os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        )
    else:
        state.touch()
        state = state if fault == "a file" else state / "inside"
    result = here(*command, state)
    words = (
        f"cannot write to {state}: No space"
        if fault == "full"
        else f"{state} cannot be a folder: Not a directory"
    )
    assert words in result.stderr
    assert result.returncode in (1, 2, os.EX_NOINPUT, os.EX_IOERR)


def run_head(begin: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """`vfl coordinate` for ever, in a process that runs `begin` first."""
    options = ["vfl", "coordinate", "mqtt://127.0.0.1:1", "--sensors", "press,oven"]
    options += ["--labels", "labels.csv", "--classes", "ok,burr"]
    program = f"{begin}from edge_node.cli.main import main\nmain()\n"
    return subprocess.run(
        [sys.executable, "-c", program, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_head_that_loads_torch_says_so_and_is_ended_by_a_signal(tmp_path: Path) -> None:
    loading = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'edge_node.extensions.vfl.server.startup':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "            sys.exit(3)\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    ended = run_head(loading, tmp_path)
    assert ended.returncode == 130
    assert "torch" in ended.stderr


def test_a_head_without_a_last_round_says_when_it_is_stopped_that_it_goes_on(
    tmp_path: Path,
) -> None:
    stopped = (
        "from edge_node.extensions.vfl.server import startup\n"
        "startup.coordinate = lambda *_, **__: 45\n"
    )
    ended = run_head(stopped, tmp_path)
    assert ended.returncode == 0
    assert "same command" in ended.stderr
