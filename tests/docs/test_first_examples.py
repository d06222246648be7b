"""The first example of each page runs as it stands, in an empty folder, with nothing but this project."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

# Pages whose first example is not run here. All commands of theirs are parsed, with their options: test_commands.py.
ELSEWHERE = {
    "README.md": "installs everything, then takes minutes: tests/trainer/demo runs the demo",
    "docs/add-a-dataset.md": "downloads what the page lists: test_add_a_dataset.py runs it with a server of its own",
    "docs/add-a-method.md": "needs the page's file in its place: test_add_a_method.py",
    "docs/add-a-partition.md": "needs the page's file in its place: test_add_a_partition.py",
    "docs/add-an-encoder.md": "needs the page's file in its place: test_add_an_encoder.py",
    "docs/console.md": "serves until it is stopped: tests/trainer/console does both",
    "docs/install.md": "installs: tests/offline.sh, of `make offline`",
    "docs/results.md": "takes days, and the papers' data sets",
}
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")))
FIRST = {
    page: found[1]
    for page in PAGES
    if (found := re.search(r"^```sh\n(.*?)^```", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL))
}
QUICK = {"docs/troubleshooting.md"}


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The commands in a shell that knows `edge-node` as this project's."""
    program = folder / "bin" / "edge-node"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edge.cli.main "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    (folder / "empty").mkdir()
    return subprocess.run(
        ["sh", "-euc", script], cwd=folder / "empty", env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in FIRST if page not in ELSEWHERE],
)
def test_the_first_example_runs_as_it_stands(page: str, tmp_path: Path) -> None:
    done = shell(FIRST[page], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_what_is_not_run_is_known_and_does_not_outlive_its_page() -> None:
    assert sorted(ELSEWHERE.keys() - FIRST.keys()) == []
    assert set(PAGES) - FIRST.keys() == {"docs/architecture.md", "docs/protocol.md", "docs/security.md"}


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    done = shell("edge-node check nowhere\nedge-node --version", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
