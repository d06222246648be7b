"""Examples run as they stand, in an empty folder, with nothing but this project: all of the guides, else the first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from broker_config.broker.embedded import find_mosquitto
from tests.support.paths import REPOSITORY

# Pages whose first example is not run here. All commands of theirs are parsed, with their options: test_commands.py.
ELSEWHERE = {
    "README.md": "installs everything, then takes minutes: tests/trainer/demo runs the demo",
    "docs/add-a-dataset.md": "downloads what the page lists: test_add_a_dataset.py runs it with a server of its own",
    "docs/add-a-method.md": "needs the page's file in its place: test_add_a_method.py",
    "docs/add-a-partition.md": "needs the page's file in its place: test_add_a_partition.py",
    "docs/add-an-encoder.md": "needs the page's file in its place: test_add_an_encoder.py",
    "docs/federation.md": "begins with drawn images that its commands do not need: docs/first-federation.md is run",
    "docs/console.md": "serves until it is stopped: tests/trainer/console does both",
    "docs/install.md": "installs: tests/offline.sh, of `make offline`",
    "docs/research.md": "needs a data set, and takes hours: tests/research",
    "docs/results.md": "takes days, and the papers' data sets",
}
# Guides, all of whose blocks are run one after the other in one folder, but for so many at the beginning.
GUIDES = {
    "docs/first-federation.md": 2,  # `make demo` installs everything; --data needs images
    "docs/folder-to-model.md": 0,
    "docs/operate.md": 1,  # installs versions that are not here
    "docs/three-plants-tls.md": 0,
}
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")))
BLOCKS = {
    page: re.findall(r"^```sh\n(.*?)^```", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL) for page in PAGES
}
FIRST = {page: blocks[0] for page, blocks in BLOCKS.items() if blocks}
QUICK = {"docs/troubleshooting.md"}


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The commands in a shell that knows `edge-node` as this project's."""
    program = folder / "bin" / "edge-node"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edge.cli.main "$@"\n')
    program.chmod(0o755)
    if os.geteuid() == 0:  # it would become a user who may not read what pytest's folders hold
        as_root = '(cat "$2"; grep -q "^user " "$2" || echo user root) >"$2.root"'
        (program.parent / "mosquitto").write_text(f'#!/bin/sh\n{as_root}\nexec {find_mosquitto()} -c "$2.root"\n')
        (program.parent / "mosquitto").chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    (folder / "empty").mkdir()
    return subprocess.run(
        ["sh", "-euc", script], cwd=folder / "empty", env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in QUICK else pytest.mark.slow)
        for page in FIRST
        if page not in {*ELSEWHERE, *GUIDES}
    ],
)
def test_the_first_example_runs_as_it_stands(page: str, tmp_path: Path) -> None:
    done = shell(FIRST[page], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_runs_from_its_first_command_to_its_last(page: str, tmp_path: Path) -> None:
    done = shell("".join(BLOCKS[page][GUIDES[page] :]), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_not_run_is_known_and_does_not_outlive_its_page() -> None:
    assert sorted(ELSEWHERE.keys() - FIRST.keys()) == []
    assert set(PAGES) - FIRST.keys() == {
        f"docs/{name}.md"
        for name in ("add-a-sink", "add-a-source", "api", "architecture", "index", "protocol", "security")
    }


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    done = shell("edge-node check nowhere\nedge-node --version", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
