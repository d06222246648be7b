"""docs/add-a-partition.md does what it says: its partition is put in place,
and simulated plants share images by it.
"""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import trainer.data.partitions
from broker_config.protocol.errors import UsageError
from tests.support.paths import REPOSITORY
from tests.support.plants import CLASSES, draw, here
from trainer.data import class_folders
from trainer.data.partition import Scheme
from trainer.data.partitions import PARTITIONS

PAGE = REPOSITORY / "docs" / "add-a-partition.md"
(FILE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(LINE,) = re.findall(r"```text\n    (\w+),\n```", PAGE.read_text())


@pytest.fixture
def dominant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's file as a module beside the others, listed by the page's line."""
    (tmp_path / "partitions").mkdir()
    (tmp_path / "partitions" / "dominant.py").write_text(FILE)
    paths = [*trainer.data.partitions.__path__, str(tmp_path / "partitions")]
    monkeypatch.setattr(trainer.data.partitions, "__path__", paths)
    module = importlib.import_module("trainer.data.partitions.dominant")
    listed = getattr(module, LINE)
    monkeypatch.setitem(PARTITIONS, listed.name, listed)
    yield module
    del sys.modules["trainer.data.partitions.dominant"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw(tmp_path / "images", 20, 1)


@pytest.mark.usefixtures("dominant")
@pytest.mark.parametrize(
    ("written", "most"), [("dominant", 6), ("dominant,sigma=0.5", 4), ("dominant,sigma=1", 8)]
)
def test_a_class_dominates_at_each_node_and_no_image_is_at_two(
    written: str, most: int, images: Path
) -> None:
    shares = Scheme(written, 3, 8, 1, pool="all", test_samples=4).shares(class_folders.scan(images))
    counts = [
        Counter(entry.class_name for entry in share.train.entries).most_common() for share in shares
    ]
    assert [(each[0][1], sum(count for _, count in each)) for each in counts] == [(most, 8)] * 3
    assert {each[0][0] for each in counts} == set(CLASSES)
    held = [
        entry.digest
        for share in shares
        for part in (share.train, share.test)
        for entry in part.entries
    ]
    assert len(held) == len(set(held))


@pytest.mark.usefixtures("dominant")
def test_a_share_above_all_of_it_is_refused(images: Path) -> None:
    with pytest.raises(UsageError, match="dominant"):
        Scheme("dominant,sigma=2", 3, 8, 1).shares(class_folders.scan(images))


@pytest.mark.usefixtures("dominant")
def test_a_federation_of_it_is_simulated(images: Path, tmp_path: Path) -> None:
    result = here(
        "simulate",
        "--data",
        images,
        "--nodes",
        3,
        "--partition",
        "dominant,sigma=0.75",
        "--samples",
        8,
        "--test-samples",
        4,
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
        "--out",
        tmp_path / "out",
        "--quiet",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    nodes = json.loads(result.stdout)["result"]["nodes"]
    assert [(node["classes"], node["images"]) for node in nodes] == [([*CLASSES], 8)] * 3


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert named
    assert all((PAGE.parent / name).exists() for name in named)
