"""A line's pages while the folder of labelled images is odd, away or damaged: they are there,
and labels say what is wrong.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.labelling.label_history import LabelHistory, Labelling
from tests.support.classified_images import judged_bundle
from tests.support.daemon_process import Daemon, serving_daemon

HISTORY = "labels-line-1.jsonl"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_bundle(tmp_path_factory.mktemp("bundle") / "a")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "line.toml").write_text(
        '[keep]\npath = "kept"\nwhat = "all"\n[labels]\npath = "images"\n'
    )
    (tmp_path / "images" / "rust").mkdir(parents=True)
    return tmp_path / "images"


@pytest.fixture
def line(images: Path, bundle: Path) -> Iterator[Daemon]:
    (images / os.fsdecode(b"Kratzer_\xe4")).mkdir()
    (images / "a\nb").mkdir()
    folder = images.parent
    with serving_daemon(folder / "state", bundle, "--config", folder / "line.toml") as found:
        yield found


def test_a_folder_that_no_class_can_be_called_like_takes_no_page_away(line: Daemon) -> None:
    state = line.client.get("/line/state").raise_for_status().json()
    queue = line.client.get("/labels/queue").raise_for_status().json()
    assert state["labels"] == queue["classes"]
    assert state["labels"][-1] == "rust"


def test_a_folder_that_is_away_takes_no_page_away(line: Daemon, images: Path) -> None:
    images.rename(images.with_name("moved"))
    for path in ("/line/state", "/labels/queue"):
        line.client.get(path).raise_for_status()


def test_a_line_whose_labels_are_damaged_serves_without_them(images: Path, bundle: Path) -> None:
    history = LabelHistory(images / HISTORY)
    history.add(Labelling(id="1", time="now", person="anna", label=None, images=()))
    content = bytearray((images / HISTORY).read_bytes())
    content[20] ^= 1
    (images / HISTORY).write_bytes(content)
    folder = images.parent
    with serving_daemon(folder / "state", bundle, "--config", folder / "line.toml") as line:
        assert line.client.get("/line/state").raise_for_status().json()["labels"] is None
        assert line.client.get("/labels/queue").status_code == 404
    assert (images / HISTORY).read_bytes() == content
