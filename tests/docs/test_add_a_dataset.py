"""docs/add-a-dataset.md does what it says: its data set is put in place,
downloaded from a server, and verified.
"""

import importlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import trainer.data.datasets
from tests.support.file_server import serve
from tests.support.paths import REPOSITORY
from tests.support.plants import draw, here
from trainer.data.datasets import DATASETS
from trainer.data.datasets.dataset import Dataset, Images

PAGE = REPOSITORY / "docs" / "add-a-dataset.md"
FILE, CHECKSUMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(LINE,) = re.findall(r"```text\n    (\w+),\n```", PAGE.read_text())
CLASSES = ["blowhole", "break", "crack", "fray", "free", "uneven"]
CHECKOUT = "Magnetic-tile-defect-datasets.-01aa7163"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of an archive as GitHub packs the data set: images of MT_CLASS/Imgs,
    each with its mask.
    """
    images = draw(tmp_path / "drawn", 12, 1, classes=CLASSES)
    (tmp_path / "served").mkdir()
    with zipfile.ZipFile(tmp_path / "served" / "tiles.zip", "w") as archive:
        archive.writestr(f"{CHECKOUT}/README.md", "upcoming")
        archive.writestr(f"{CHECKOUT}/dataset.jpg", b"an overview")
        for path in images.glob("*/*.png"):
            stem = f"{CHECKOUT}/MT_{path.parent.name.capitalize()}/Imgs/exp1_num_{path.stem}"
            archive.write(path, f"{stem}.jpg")
            archive.writestr(f"{stem}.png", f"mask of {stem}")
    with serve(tmp_path / "served") as url:
        yield f"{url}/tiles.zip"


@pytest.fixture
def tiles(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    """The page's file as a module beside the others, listed by the page's line,
    but for the archive's address.
    """
    (tmp_path / "datasets").mkdir()
    file, count = re.subn(r'(?<=archive=)".*"', repr(server), FILE)
    assert count == 1
    (tmp_path / "datasets" / "magnetic_tiles.py").write_text(file)
    paths = [*trainer.data.datasets.__path__, str(tmp_path / "datasets")]
    monkeypatch.setattr(trainer.data.datasets, "__path__", paths)
    listed = getattr(importlib.import_module("trainer.data.datasets.magnetic_tiles"), LINE)
    monkeypatch.setitem(DATASETS, listed.name, listed)
    yield listed
    del sys.modules["trainer.data.datasets.magnetic_tiles"]


def test_it_is_listed_with_its_licence_and_paper(tiles: Dataset) -> None:
    told = here("dataset").stdout
    assert f"{tiles.name}: {tiles.title}" in told
    assert all(text in told for text in (tiles.licence, tiles.citation, tiles.home))


def test_it_is_downloaded_without_its_masks_compared_and_used(
    tiles: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "tiles"
    result = here("dataset", tiles.name, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "72 different images of 6 classes" in result.stdout
    assert "73 image file(s) of no class" in result.stdout
    assert (
        {path.parent.name for path in out.glob("*/*.jpg")}
        == {path.name for path in out.iterdir()}
        == set(CLASSES)
    )
    result = here(
        "simulate",
        "--data",
        out,
        "--nodes",
        3,
        "--samples",
        4,
        "--test-samples",
        2,
        "--pool",
        "all",
        "--method",
        "fedavg",
        "--model",
        "small",
        "--size",
        32,
        "--rounds",
        1,
        "--quiet",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    assert {
        name for node in json.loads(result.stdout)["result"]["nodes"] for name in node["classes"]
    } == {*CLASSES}


def test_with_the_checksums_that_the_page_prints_another_copy_is_refused(
    tiles: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert here("dataset", tiles.name, "--out", tmp_path / "tiles").returncode == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(CHECKSUMS, str(PAGE), "exec"), {})  # noqa: S102  (our own page)
    classes = eval(f"{{{capsys.readouterr().out}}}", {"Images": Images})  # noqa: S307  (likewise)
    assert list(classes) == CLASSES
    known = replace(tiles, classes=classes)
    monkeypatch.setitem(DATASETS, known.name, known)
    assert (
        "this is magnetic-tiles, image by image"
        in here("dataset", known.name, "--out", tmp_path / "again").stdout
    )
    assert here("dataset", known.name, "--verify", tmp_path / "tiles").returncode == 0
    changed = next((tmp_path / "tiles" / "fray").iterdir())
    changed.write_bytes(changed.read_bytes() + b"!")
    result = here("dataset", known.name, "--verify", tmp_path / "tiles")
    assert result.returncode == 1
    assert "fray: 12 images" in result.stdout


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert named
    assert all((PAGE.parent / name).exists() for name in named)
