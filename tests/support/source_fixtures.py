"""What the tests of sources share: a model, a line and its folder of images, and no patience.

A conftest.py imports these by name.
"""

from pathlib import Path

import pytest

from edge.config.instance import Instance
from edge.inference.served_model import Model, load_model
from edge.sources import folder as folder_source
from edge.sources import source_runner
from tests.support.tiny_bundle import tiny_bundle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(tiny_bundle(tmp_path_factory.mktemp("sources") / "bundle").folder)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_source, "QUIET", 0.05)
    monkeypatch.setattr(source_runner, "FIRST", 0.05)
    monkeypatch.setattr(source_runner, "LONGEST", 0.2)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance("line-1", tmp_path / "state")


@pytest.fixture
def camera(tmp_path: Path) -> Path:
    folder = tmp_path / "camera"
    folder.mkdir()
    return folder
