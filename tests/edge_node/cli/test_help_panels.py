"""Panels of the help: few options come first, and the tables name what there is."""

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import typer

from edge_node.cli.help_panels import COMMANDS, FEW, OTHERS, Panel
from edge_node.cli.main import app, command_tree
from tests.support.plants import here

ROOT: Any = command_tree(app)


def commands(group: Any = ROOT, words: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{words}{name} ")
        else:
            yield f"{words}{name}", command


def options(command: Any) -> list[Any]:
    return [each for each in command.params if each.opts[0].startswith("-")]


MANY = [(words, command) for words, command in commands() if len(options(command)) > FEW]


def test_the_table_names_a_command_once_and_every_command_of_ours_has_a_panel() -> None:
    named = " ".join(COMMANDS.values()).split()
    assert sorted(named) == sorted({*named} & {*ROOT.commands})
    assert OTHERS not in {each.rich_help_panel for each in ROOT.commands.values()}


@pytest.mark.parametrize(("words", "command"), [*commands()])
def test_no_command_begins_with_more_than_ten_options(words: str, command: Any) -> None:
    first = [each for each in options(command) if not each.rich_help_panel]
    assert 0 < len(first) <= 10 or not options(command), words


@pytest.mark.parametrize(("words", "command"), MANY)
def test_many_options_are_the_fields_of_structs(words: str, command: Any) -> None:
    kinds = [
        each.annotation
        for each in inspect.signature(inspect.unwrap(command.callback)).parameters.values()
    ]
    assert [each for each in kinds if not issubclass(each, msgspec.Struct | typer.Context)] == [], (
        words
    )


def test_every_panel_is_one_of_some_command_and_they_have_one_order_everywhere() -> None:
    shown = [
        [each.rich_help_panel for each in options(command) if each.rich_help_panel]
        for _, command in MANY
    ]
    assert {panel for panels in shown for panel in panels} == {*Panel}
    assert [panels for panels in shown if panels != sorted(panels, key=[*Panel].index)] == []


def test_few_options_stand_in_one_panel() -> None:
    few = [command for _, command in commands() if len(options(command)) <= FEW]
    assert len(few) > 10
    assert {each.rich_help_panel for command in few for each in options(command)} == {None}


def test_what_matters_first_stands_above_what_is_seldom_needed() -> None:
    shown = here("coordinate", "--help").stdout
    places = [
        shown.index(each)
        for each in ("--classes", "--method", "Rounds, and nodes", "--quorum", "--kit", "--json")
    ]
    assert places == sorted(places)
