"""What the tests need: fetched by tests/programs.sh, or named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

SYSTEMD = "tests/edge/daemon/test_service_install.py"


def folder_of(tmp_path: Path, *programs: str) -> str:
    """Make a folder that has these programs alone."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in programs:
        found = shutil.which(program)
        assert found
        (folder / program).symlink_to(found)
    return str(folder)


def test_a_system_without_apt_is_told_what_to_install(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "bash", "cat", "id", "mkdir", "realpath")
    command = ["tests/programs.sh", str(tmp_path / "programs"), "git", "chromium"]
    ended = subprocess.run(
        command, cwd=REPOSITORY, env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    for word in ("git", "chromium", "dnf install", "pacman -S"):
        assert word in ended.stderr


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_test_without_its_program_is_counted_at_the_end_and_fails_in_ci(
    ci: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PATH": folder_of(tmp_path, "bash"), "CI": ci}
    command = [sys.executable, "-m", "pytest", SYSTEMD, "-k", "test_systemd_accepts"]
    ended = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == (1 if ci else 0)
    assert ended.stdout.count("need systemd-analyze: make slow as root") == (0 if ci else 1)
    assert ("Failed: needs systemd-analyze" in ended.stdout) == bool(ci)
