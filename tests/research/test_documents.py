"""Commands in the documentation of results: every one exists, with every option that it is given."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from edge.cli.main import app as edge_node
from research.__main__ import app as research

HOUSE = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("results", "textures", "vfl", "line", "security", "install")))


def documented() -> Iterator[str]:
    """Commands of code blocks and of text, without comments."""
    for page in PAGES:
        text = (HOUSE / page).read_text().replace("\\\n", " ")
        found = re.findall(
            r"^ *((?:edge-node [a-z-]|python -m (?:research|benchmarks)).*?)(?: #.*)?$", text, re.MULTILINE
        )
        found += re.findall(r"`(python -m (?:research|benchmarks)[^`]+)`", text)
        yield from (" ".join(each.split()) for each in found)


def unknown_options(command: click.Command, given: list[str]) -> list[str]:
    """Options that a command of a command line has not."""
    while commands := getattr(command, "commands", None):
        assert given[0] in commands, f"there is no command {given[0]}"
        command, given = commands[given[0]], given[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in given if word.startswith("--") and word.partition("=")[0] not in {*known, "--help"}]


def module_options(name: str) -> set[str]:
    """What a module, or a package's __main__, adds to its parser."""
    found = importlib.util.find_spec(name)
    if found and found.submodule_search_locations:
        found = importlib.util.find_spec(f"{name}.__main__")
    assert found, f"there is no module {name}"
    assert found.origin
    calls = (node for node in ast.walk(ast.parse(Path(found.origin).read_text())) if isinstance(node, ast.Call))
    added = (call.args for call in calls if getattr(call.func, "attr", "") == "add_argument")
    return {word.value for each in added for word in each if isinstance(word, ast.Constant)}


@pytest.mark.parametrize("command", sorted(set(documented())))
def test_a_command_exists_and_has_its_options(command: str) -> None:
    given = shlex.split(command)
    if given[0] == "edge-node":
        if given[1].startswith("--"):
            return
        assert unknown_options(typer.main.get_command(edge_node), given[1:]) == []
    elif given[2] == "research":
        assert unknown_options(typer.main.get_command(research), given[3:]) == []
    else:
        options = {word.partition("=")[0] for word in given[3:] if word.startswith("--")}
        assert options <= module_options(given[2])


def test_commands_of_every_kind_are_found() -> None:
    found = set(documented())
    for start in ("edge-node vfl coordinate", "python -m research fedtfi", "python -m research.studies.attacks"):
        assert any(each.startswith(start) for each in found)
    assert len(found) > 60
