"""docs/add-a-method.md does what it says: its method is put in place, passes its own test,
and runs.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.method_cases import CASES, equal, one_round
from tests.support.paths import REPOSITORY
from trainer.methods import METHODS
from trainer.models.network import to_arrays

PAGE = REPOSITORY / "docs" / "add-a-method.md"
FILE, TEST = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def fedbabu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's file as a module, registered by the page's line."""
    (tmp_path / "fedbabu.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, where in tomllib.loads(PROJECT)["project"]["entry-points"][
        "edge_node.methods"
    ].items():
        monkeypatch.setitem(METHODS, name, EntryPoint(name, where, "edge_node.methods").load())
        monkeypatch.setitem(CASES, name, (name, {}))
    yield sys.modules["fedbabu"]
    del sys.modules["fedbabu"]


def test_the_file_is_short() -> None:
    assert len(FILE.splitlines()) <= 80


def test_the_pages_test_passes_and_fails_for_another_method(fedbabu: ModuleType) -> None:
    def tests(source: str) -> Iterator[tuple[str, object]]:
        found: dict[str, object] = {}
        exec(compile(source, str(PAGE), "exec"), found)  # noqa: S102  (likewise)
        return ((name, each) for name, each in found.items() if name.startswith("test_"))

    passed = [name for name, test in tests(TEST) if test() is None]  # type: ignore[operator]
    assert len(passed) == 2
    for _, test in tests(TEST.replace('federate("fedbabu")', 'federate("fedrep")')):
        with pytest.raises(AssertionError):
            test()  # type: ignore[operator]


def test_the_pages_method_runs_and_differs_from_fedavg(fedbabu: ModuleType) -> None:
    mine, theirs = one_round("fedbabu"), one_round("fedavg")
    for name, model in mine.models.items():
        assert not equal(to_arrays(model.tensors), to_arrays(theirs.models[name].tensors))
        assert "L_P" in model.metadata.history[0]


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", PAGE.read_text())) - {
        "tests/test_fedbabu.py",
    }
    assert named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
