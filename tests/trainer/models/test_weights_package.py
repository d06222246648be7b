"""The files of `edge-node-weights`, and what is said where that package is missing."""

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from broker_config.protocol.errors import UsageError
from tests.support.plants import draw, here
from trainer.models.catalogue import SHIPPED, find_shipped
from trainer.models.initial_weights import initial_encoder
from trainer.models.weights_package import PACKAGE, find_file

# Commands that start from these weights, without their folders of images.
COMMANDS = {
    "coordinate": ("coordinate", "mqtt://127.0.0.1:1", "--classes", "a,b", "--nodes", 2),
    "simulate": ("simulate", "--partition", "iid", "--nodes", 2, "--out", "run", "--data"),
}
SURFACE = ("--model", "mobilenet_v2", "--weights", "surface")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds no package of that name, as in an install without it."""
    monkeypatch.setitem(sys.modules, PACKAGE, None)


def assert_named(text: str, file: str) -> None:
    assert file in text
    assert f"pip install edge-node-weights=={version('edge-node')}" in text
    assert "edge-node[train]" in text


@pytest.mark.parametrize("model", SHIPPED)
def test_every_encoders_weights_are_in_the_package(model: str) -> None:
    found = find_shipped(model, SHIPPED[model].weights)
    assert found == tuple(find_file(name) for name in SHIPPED[model].files)
    assert [file.name for file in found] == list(SHIPPED[model].files)
    assert {file.parent.name for file in found} == {PACKAGE}


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("model", SHIPPED)
def test_weights_without_the_package_name_it_and_how_it_is_installed(model: str) -> None:
    with pytest.raises(UsageError) as caught:
        initial_encoder(model, SHIPPED[model].weights, 0)
    assert_named(str(caught.value), SHIPPED[model].files[0])


@pytest.mark.usefixtures("missing")
def test_without_the_package_weights_of_other_kinds_are_as_before() -> None:
    assert initial_encoder("mobilenet_v2", "none", 0)
    assert find_shipped("mobilenet_v2", "none") == ()
    with pytest.raises(UsageError, match="no surface weights for 'small'"):
        initial_encoder("small", "surface", 0)


@pytest.mark.parametrize("content", [["__init__.py"], []])
def test_a_package_without_the_file_counts_as_missing(
    content: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another version, or what an uninstalled one has left: a folder without a module."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    for name in content:
        (folder / name).touch()
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    others = [each for each in sys.path if not (Path(each) / PACKAGE).exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    importlib.invalidate_caches()
    with pytest.raises(UsageError) as caught:
        find_file("surface_mobilenet_v2.safetensors")
    assert_named(str(caught.value), "surface_mobilenet_v2.safetensors")


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_needs_them_says_so(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *words = COMMANDS[command]
    words = (name, *SURFACE, *words)
    if command != "coordinate":
        words = (*words, draw(tmp_path / "images", 24, 0))
    done = here(*words)
    assert done.returncode == 2
    assert_named(" ".join(done.stderr.split()), ".safetensors")
