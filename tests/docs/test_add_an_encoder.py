"""docs/add-an-encoder.md does what it says: its encoder is put in place, trains,
is exported and serves.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge.bundle.bundle_format import read_bundle
from edge.inference.predictor import Predictor
from export.bundle_export import export
from tests.support.paths import REPOSITORY
from tests.support.plants import CLASSES, draw
from trainer import progress
from trainer.data.partition import Scheme
from trainer.federation.server.spec import Request
from trainer.federation.simulation import simulate_folder
from trainer.models import catalogue
from trainer.models.initial_weights import initial_encoder

PAGE = REPOSITORY / "docs" / "add-an-encoder.md"
(FILE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def shufflenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's file as a module, registered by the page's line."""
    (tmp_path / "plant_shufflenet.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    registered = tomllib.loads(PROJECT)["project"]["entry-points"]["edge_node.encoders"]
    for name, where in registered.items():
        encoder = EntryPoint(name, where, "edge_node.encoders").load()
        monkeypatch.setitem(catalogue.KNOWN, name, encoder)
        monkeypatch.setitem(catalogue.FEATURES, name, encoder.features)
        monkeypatch.setitem(catalogue.VALUES, name, encoder.values)
    yield sys.modules["plant_shufflenet"]
    del sys.modules["plant_shufflenet"]


@pytest.mark.usefixtures("shufflenet")
def test_its_first_tensors_follow_from_a_seed_and_are_as_many_as_it_says() -> None:
    first, again, other = (initial_encoder("shufflenet", "none", seed) for seed in (1, 1, 2))
    assert sum(each.size for each in first.values()) == catalogue.VALUES["shufflenet"]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not all(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.slow
@pytest.mark.usefixtures("shufflenet")
def test_it_trains_in_a_federation_and_its_bundle_answers_as_torch_does(tmp_path: Path) -> None:
    images = draw(tmp_path / "images", 20, 1, size=64)
    request = Request(
        "fedavg",
        model="shufflenet",
        weights="none",
        size=64,
        rounds=1,
        training={"local_epochs": 1},
    )
    scheme = Scheme("iid", 2, 6, 1, pool="all", test_samples=3)
    simulate_folder(request, [images], {}, scheme, tmp_path / "out", progress.ignore)
    (written,) = export(
        [tmp_path / "out" / "plant-1" / "model"], tmp_path / "bundles", progress.ignore
    )
    bundle = read_bundle(written.folder)  # whose graph has been compared with torch
    Predictor(bundle).self_test()
    assert tuple(bundle.manifest.classes) == CLASSES


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert named
    assert all((PAGE.parent / name).exists() for name in named)
