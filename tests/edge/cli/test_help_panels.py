"""Panels of the help: few options come first, and the tables name what there is."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from edge.cli.help_panels import COMMANDS, OPTIONS
from edge.cli.main import app
from tests.support.plants import here

ROOT: Any = typer.main.get_command(app)


def commands(group: Any = ROOT, words: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{words}{name} ")
        else:
            yield f"{words}{name}", command


def test_the_tables_name_each_command_once_and_no_option_that_is_gone() -> None:
    assert sorted(" ".join(COMMANDS.values()).split()) == sorted(ROOT.commands)
    names = " ".join(OPTIONS.values()).split()
    assert len(names) == len({*names})
    assert {*names} <= {each.opts[0].lstrip("-") for _, command in commands() for each in command.params}


@pytest.mark.parametrize(("words", "command"), [*commands()])
def test_no_command_begins_with_more_than_a_dozen_options(words: str, command: Any) -> None:
    first = [each for each in command.params if each.opts[0].startswith("-") and not each.rich_help_panel]
    assert len(first) <= 12, words


def test_what_matters_first_stands_above_what_is_seldom_needed() -> None:
    shown = here("coordinate", "--help").stdout
    places = [
        shown.index(each) for each in ("--classes", "--method", "Rounds, and nodes", "--quorum", "--kit", "--json")
    ]
    assert places == sorted(places)
