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


# Of the kernel: a new one retires an old one.
MOST_COMMANDS = 30
MOST_OPTIONS = 255

MANY = [(words, command) for words, command in commands() if len(options(command)) > FEW]


def in_kernel(command: Any) -> bool:
    """Whether a command is the command line's own, and not an extension's."""
    return bool(command.callback) and inspect.unwrap(command.callback).__module__.startswith(
        "edge_node.cli."
    )


def test_the_table_names_each_command_of_the_kernel_once() -> None:
    named = " ".join(COMMANDS.values()).split()
    own = {name for name, command in ROOT.commands.items() if in_kernel(command)}
    assert len(named) == len(set(named))
    assert own <= set(named) <= set(ROOT.commands)


def test_the_kernel_has_no_more_commands_and_options_than_before() -> None:
    kernel = [command for _, command in commands() if in_kernel(command)]
    assert len(kernel) <= MOST_COMMANDS
    assert sum(len(options(command)) for command in kernel) <= MOST_OPTIONS


def test_a_command_of_an_extension_stands_in_a_panel_that_it_names() -> None:
    assert OTHERS not in {command.rich_help_panel for command in ROOT.commands.values()}


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
