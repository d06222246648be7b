"""What former versions had and this one has not: whoever gives it is told its name,
and what to do instead.
"""

from pathlib import Path

import pytest

from broker_config.protocol.errors import UsageError
from edge.config.retired import RETIRED_COMMANDS, RETIRED_OPTIONS, refuse_retired
from edge_node.cli.main import app, command_tree
from tests.support.plants import here


def options_of(words: list[str]) -> set[str]:
    """The options of a command and of those below it."""
    todo = [command_tree(app)]
    for word in words:
        todo = [todo[0].commands[word]]
    found = set()
    while todo:
        command = todo.pop()
        found.update(
            name
            for parameter in command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        )
        todo += getattr(command, "commands", {}).values()
    return found


@pytest.mark.parametrize("name", RETIRED_OPTIONS)
def test_a_retired_option_is_gone_and_whoever_gives_it_is_told_what_to_do(name: str) -> None:
    *command, option = name.split()
    assert option not in options_of(command)
    for given in ([option, "x"], [f"{option}=x"]):
        with pytest.raises(UsageError, match=option) as caught:
            refuse_retired([*(command or ["coordinate"]), *given])
        assert caught.value.remedy == RETIRED_OPTIONS[name]


@pytest.mark.parametrize("name", RETIRED_COMMANDS)
def test_a_retired_command_is_gone_and_whoever_types_it_is_told_what_to_do(name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        refuse_retired([*name.split(), "x"])
    assert caught.value.remedy == RETIRED_COMMANDS[name]
    *group, last = name.split()
    tree = command_tree(app)
    for word in group:
        tree = tree.commands[word]
    assert last not in tree.commands


def test_an_option_that_only_another_command_has_lost_is_let_through() -> None:
    refuse_retired(["doctor", "--as", "plant-a"])
    refuse_retired([])


def test_the_command_line_the_environment_and_a_file_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = here("provision", "steel", "--as", "boris")
    (tmp_path / "coordinate.toml").write_text("min-wait = 3\n")
    read = here("coordinate", "--config", tmp_path / "coordinate.toml")
    monkeypatch.setenv("EDGE_NODE_COORDINATE_MIN_WAIT", "3")
    inherited = here("coordinate")
    expected = [
        ("--as", "provision --as"),
        ("min-wait", "coordinate --min-wait"),
        ("EDGE_NODE_COORDINATE_MIN_WAIT", "coordinate --min-wait"),
    ]
    for done, (name, retired) in zip((typed, read, inherited), expected, strict=True):
        assert done.returncode == 2
        assert name in done.stderr
        assert " ".join(RETIRED_OPTIONS[retired].split()) in " ".join(done.stderr.split())
