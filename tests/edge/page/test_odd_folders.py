"""A line's pages while the folder of labelled images is odd, away or damaged: they are there,
and labels say what is wrong.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.http.login import Accounts
from edge.labelling.label_history import LabelHistory, Labelling
from tests.support.classified_images import judged_bundle
from tests.support.daemon_process import Daemon, serving_daemon
from tests.support.plants import run
from tests.support.tiny_bundle import BLUE
from tests.support.waiting import wait_until

HISTORY = "labels-line-1.jsonl"
DAMAGED = "edge_node_labels_damaged 1.0"
PASSWORD = "correct horse"  # noqa: S105  (of a line that lives for this test)


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
        state = line.client.get("/line/state").raise_for_status().json()
        assert state["labels"] is None
        assert state["labels_damaged"]
        assert DAMAGED in line.client.get("/metrics").text
        assert line.client.get("/labels/queue").status_code == 404
    assert (images / HISTORY).read_bytes() == content


def test_labels_that_are_damaged_while_the_line_runs_are_told(images: Path, bundle: Path) -> None:
    folder = images.parent
    Accounts(folder / "state").set("anna", PASSWORD)
    with serving_daemon(folder / "state", bundle, "--config", folder / "line.toml") as line:
        assert not line.client.get("/line/state").raise_for_status().json()["labels_damaged"]
        assert DAMAGED not in line.client.get("/metrics").text
        line.client.post("/login", json={"name": "anna", "password": PASSWORD}).raise_for_status()
        kept = line.classify(BLUE).json()["kept"]
        wait_until(lambda: kept in line.client.get("/labels/queue").text)
        (images / HISTORY).write_bytes(b"{}\n")

        refused = line.client.post("/labels/label", json={"images": [kept], "label": "rust"})

        assert refused.status_code == 500
        assert HISTORY in refused.json()["error"]
        assert HISTORY in refused.json()["remedy"]
        assert line.client.get("/line/state").raise_for_status().json()["labels_damaged"]
        assert DAMAGED in line.client.get("/metrics").text
    assert [*images.glob("rust/[!.]*")] == []


def test_a_second_line_of_one_name_on_the_same_folder_is_refused(
    images: Path, bundle: Path
) -> None:
    folder = images.parent
    words = ("serve", bundle, "--config", folder / "line.toml", "--port", "0")
    with serving_daemon(folder / "state", bundle, "--config", folder / "line.toml") as first:
        second = run(*words, "--memory", folder / "other")
        assert second.returncode == os.EX_CONFIG
        assert str(images) in second.stderr
        assert str(first.process.pid) in second.stderr

        # nor may a line of another name have the same images waiting: each would label them
        third = run(*words, "--memory", folder / "other", "--line", "line-2")
        assert third.returncode == os.EX_CONFIG
        assert str(folder / "kept") in third.stderr
