"""Names that former versions had are refused with what to do without them, wherever they are given."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.cli.main import app, command_tree
from edge.config import retired
from tests.support.plants import here


def test_a_retired_option_is_refused_with_its_name_and_what_to_do() -> None:
    result = here("export", "model", "--student")
    assert result.returncode == 2
    assert "--student" in result.stderr
    assert retired.RETIRED_OPTIONS["--student"] in result.stderr


def test_a_retired_option_is_found_with_its_value_and_behind_its_command_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(retired.RETIRED_OPTIONS, "join --wings", "walk")
    assert "walk" in here("join", "--wings=2").stderr
    assert "walk" not in here("serve", "--wings", "2").stderr


def test_a_retired_option_is_refused_in_a_file_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(retired.RETIRED_OPTIONS, "serve --wings", "walk instead")
    file = tmp_path / "line.toml"
    file.write_text("wings = 2\n")
    result = here("serve", "--config", file)
    assert "wings" in result.stderr
    assert "walk instead" in result.stderr
    monkeypatch.setenv("EDGE_NODE_SERVE_WINGS", "2")
    result = here("serve")
    assert "EDGE_NODE_SERVE_WINGS" in result.stderr
    assert "walk instead" in result.stderr


def test_a_retired_command_is_refused_with_its_name_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(retired.RETIRED_COMMANDS, "bundle fly", "walk")
    result = here("bundle", "fly", "away")
    assert result.returncode == 2
    assert "edge-node bundle fly" in result.stderr
    assert "walk" in result.stderr
    assert "walk" not in here("bundle", "list").stderr


def words_of(command: Any, *before: str) -> Iterator[str]:
    """Every command and every option behind its command, as the tables write them."""
    yield " ".join(before)
    for parameter in command.params:
        yield from (" ".join((*before, option)) for option in parameter.opts)
    for name, below in getattr(command, "commands", {}).items():
        yield from words_of(below, *before, name)


def test_nothing_that_there_is_counts_as_retired() -> None:
    for words in words_of(command_tree(app)):
        retired.refuse_retired(words.split())
