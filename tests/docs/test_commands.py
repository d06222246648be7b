"""Commands and settings in README.md, docs/ and the pages of results:
each block is parsed by what it is for.
"""

import configparser
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from edge_node.cli.main import app, command_tree
from research.__main__ import app as research
from tests.support.paths import REPOSITORY

PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for pattern in ("README.md", "docs/*.md", "research/results/**/README.md")
    for path in REPOSITORY.glob(pattern)
)
# What blocks call besides our own commands.
OTHERS = {
    "apt-get", "awk", "cat", "cd", "chown", "cp", "curl", "done", "dpkg", "git", "jq", "kill",
    "mkdir", "mosquitto", "mypy", "pip", "python3",
    "rm", "ruff", "sleep", "ssh", "systemctl", "tar", "useradd", "wait",
}  # fmt: skip


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found = [
        Block(page, language, text)
        for page in PAGES
        for language, text in re.findall(
            r"^```(\w*)\n(.*?)^```", (REPOSITORY / page).read_text(), re.DOTALL | re.MULTILINE
        )
        if language in languages
    ]
    assert found, languages
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without comments and assignments;
    a loop's variable has its first value.
    """
    loop: dict[str, str] = {}
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if command[:1] == ["for"]:
                    loop[f"${command[1]}"] = command[3]
                elif command:
                    yield [
                        part
                        for each in command
                        for part in (loop[each].split() if each in loop else [each])
                    ]
                command = []
            elif command or (word != "do" and not re.fullmatch(r"[A-Z_]+=.*", word)):
                command.append(word)


def command_of(
    application: typer.Typer, words: list[str]
) -> tuple[TyperCommand | TyperGroup, list[str]]:
    """The command that a command line names, and the words behind its name."""
    command = command_tree(application)
    while isinstance(command, TyperGroup) and words:
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    return command, words


def parse(application: typer.Typer, words: list[str]) -> None:
    """Parse a command line without running it."""
    command, given = command_of(application, words)
    if "--help" not in given:
        command.make_context(command.name, given)


def unknown_options(application: typer.Typer, words: list[str]) -> set[str]:
    """Options of a command line that its command does not have; values need not be complete."""
    command, given = command_of(application, words)
    known = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return options(given) - known - {"--help"}


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def check_module(name: str, words: list[str]) -> None:
    """A module that can be run, and has the options that it is given."""
    found = importlib.util.find_spec(name)
    if found and found.submodule_search_locations:
        found = importlib.util.find_spec(f"{name}.__main__")
    assert found, f"there is no module {name}"
    source = Path(str(found.origin)).read_text()
    assert "__main__" in source, f"{name} cannot be run"
    assert [option for option in options(words) if f'"{option}"' not in source] == []


def check_command(words: list[str]) -> None:
    program = (
        Path(words[0]).name
        if words[0].startswith((".venv/bin/", "/opt/edge-node/bin/"))
        else words[0]
    )
    if program == "edge-node":
        parse(app, words[1:])
    elif (
        program in ("python", "python3")
        and words[1:2] == ["-m"]
        and words[2] not in ("venv", "pip")
    ):
        if words[2] == "research":
            parse(research, words[3:])
        else:
            check_module(words[2], words[3:])
    elif program == "make":
        targets = set(
            re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        )
        assert {
            word for word in words[1:] if "=" not in word and not word.startswith("-")
        } <= targets
    else:
        assert program in OTHERS or (REPOSITORY / program).exists(), f"what is {program}?"


COMMANDS = [(block.page, words) for block in blocks("sh") for words in commands(block)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {shlex.join(words)}" for page, words in COMMANDS]
)
def test_every_command_can_be_typed(page: str, words: list[str]) -> None:
    check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "edge-node fly",
        "edge-node join --wings 2",
        "python -m trainer.nowhere",
        "make haste",
        "frobnicate",
        "edge-node vfl fly",
    ],
)
def test_a_command_that_is_none_is_found(line: str) -> None:
    with pytest.raises((AssertionError, TyperException)):
        check_command(line.split())


INLINE = [
    (page, text)
    for page in PAGES
    for text in re.findall(
        r"`((?:edge-node [a-z]|python -m (?:research|benchmarks|tests))[^`\n]*)`",
        (REPOSITORY / page).read_text(),
    )
]


@pytest.mark.parametrize(("page", "text"), sorted(set(INLINE)))
def test_every_command_in_a_sentence_exists_with_its_options(page: str, text: str) -> None:
    program, *words = text.split()
    if program == "edge-node":
        assert unknown_options(app, words) == set()
    elif words[1] == "research":
        assert unknown_options(research, words[2:]) == set()
    else:
        check_module(words[1], words[2:])


def every_option(application: typer.Typer) -> set[str]:
    """Options of all commands of an application."""
    todo = [command_tree(application)]
    found = {"--help"}
    while todo:
        command = todo.pop()
        found.update(
            name
            for parameter in command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        )
        todo += command.commands.values() if isinstance(command, TyperGroup) else []
    return found


def module_options() -> set[str]:
    """Options of what is run by `python -m`: benchmarks, studies, campaigns."""
    folders = (
        REPOSITORY / "benchmarks",
        REPOSITORY / "research" / "studies",
        REPOSITORY / "tests" / "support",
    )
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    return {
        name
        for source in sources
        for name in re.findall(r'add_argument\(\s*"(--[a-z0-9-]+)"', source)
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_option_in_a_sentence_is_one_of_some_command(page: str) -> None:
    prose = re.sub(
        r"^```.*?^```", "", (REPOSITORY / page).read_text(), flags=re.DOTALL | re.MULTILINE
    )
    named = set(re.findall(r"`(--[a-z][a-z0-9-]*)", prose))
    assert named - every_option(app) - every_option(research) - module_options() == set()


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.page)
def test_every_settings_file_is_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", blocks("ini"), ids=lambda block: block.page)
def test_every_ini_file_can_be_read(block: Block) -> None:
    parser = configparser.ConfigParser(strict=False, allow_no_value=True, interpolation=None)
    parser.read_string(block.text if "[" in block.text else "[top]\n" + block.text)


def test_no_block_is_of_a_kind_that_nobody_checks() -> None:
    checked = {"sh", "toml", "ini", "json", "python", "acl", "mermaid", "text"}
    kinds = {
        (page, kind)
        for page in PAGES
        for kind in re.findall(r"^```(\w*)\n.*?^```", (REPOSITORY / page).read_text(), re.M | re.S)
    }
    assert {(page, kind) for page, kind in kinds if kind not in checked} == set()


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_hidden_from_these_tests_by_being_indented(page: str) -> None:
    text = re.sub(
        r"^```\w+\n.*?^```\n", "", (REPOSITORY / page).read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert "```" not in text
    assert re.findall(r"(?<=\n\n)    .*", text) == []


def test_the_readme_names_no_command_that_does_not_exist() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    known = {*command_tree(app).commands, "version"}
    assert set(re.findall(r"edge-node ([a-z][a-z-]*)", readme)) <= known
