"""Options in the environment: what is typed beats them, and they beat the file."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_config.security import secret_environment
from edge_node.cli.main import app, command_tree
from tests.support.plants import here, run
from tests.support.tiny_bundle import tiny_bundle


def commands(command: Any, *before: str) -> Iterator[tuple[str, Any]]:
    """Every command with its words."""
    below = getattr(command, "commands", {})
    for name, each in below.items():
        yield from commands(each, *before, name)
    if not below:
        yield " ".join(before), command


def params(command: str, *words: object) -> dict[str, Any]:
    """What a command is called with, given these words."""
    found: dict[str, Any] = (
        command_tree(app).commands[command].make_context(command, list(map(str, words))).params
    )
    return found


@pytest.mark.slow
def test_the_environment_beats_the_file_and_the_command_line_beats_both(tmp_path: Path) -> None:
    file = tmp_path / "line.toml"
    file.write_text('bundle = "none"\nhost = "nowhere.invalid"\nport = -1\n')
    for port, typed, expected in (("-2", (), "-2"), ("-2", ("--port", "-3"), "-3"), ("", (), "-1")):
        result = run("serve", *typed, EDGE_NODE_SERVE_CONFIG=str(file), EDGE_NODE_SERVE_PORT=port)
        assert f"cannot listen on nowhere.invalid, port {expected}" in result.stderr


@pytest.mark.parametrize(
    ("name", "words", "in_file", "in_environment", "typed", "expected"),
    [
        (
            "line",
            ["--line", "typed"],
            'line = "file"',
            "environment",
            "typed",
            ["file", "environment", "typed"],
        ),
        ("port", ["--port", "3"], "port = 1", "2", 3, [1, 2, 3]),
        (
            "accept_older",
            ["--accept-older"],
            "accept-older = false",
            "true",
            True,
            [False, True, True],
        ),
        (
            "allow_host",
            ["--allow-host", "c"],
            'allow-host = ["a"]',
            "b d",
            ["c"],
            [["a"], ["b", "d"], ["c"]],
        ),
        (
            "trust",
            ["--trust", "c"],
            'trust = "/a"',
            "b",
            Path("c"),
            [Path("/a"), Path("b"), Path("c")],
        ),
        ("bundle", ["c"], 'bundle = "/a"', "b", Path("c"), [Path("/a"), Path("b"), Path("c")]),
    ],
)
def test_an_option_of_each_kind_comes_from_the_file_the_environment_or_the_command_line(
    name: str,
    words: list[str],
    in_file: str,
    in_environment: str,
    typed: Any,
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "line.toml"
    file.write_text(f"{in_file}\n")
    found = [params("serve", "--config", file)[name]]
    monkeypatch.setenv(f"EDGE_NODE_SERVE_{name.upper()}", in_environment)
    found.append(params("serve", "--config", file)[name])
    found.append(params("serve", "--config", file, *words)[name])
    assert found == expected
    monkeypatch.setenv(f"EDGE_NODE_SERVE_{name.upper()}", "")
    assert params("serve", "--config", file)[name] == expected[0], "an empty variable is none"
    assert params("serve", *words)[name] == typed


def test_a_command_below_another_has_variables_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_NODE_BUNDLE_LIST_MEMORY", str(tmp_path))
    monkeypatch.setenv("EDGE_NODE_BUNDLE_LIST_LINE", "press")
    monkeypatch.setenv("EDGE_NODE_BUNDLE_LIST_JSON", "true")
    result = here("bundle", "list")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(("[", "{"))


@pytest.mark.parametrize(
    ("name", "value", "why", "remedy"),
    [
        (
            "EDGE_NODE_SERVE_PORT",
            "many",
            "EDGE_NODE_SERVE_PORT=many",
            "another EDGE_NODE_SERVE_PORT",
        ),
        ("EDGE_NODE_SERVE_THREADS", "-1", "EDGE_NODE_SERVE_THREADS=-1", "unset it"),
        ("EDGE_NODE_SERVE_PROT", "1", "EDGE_NODE_SERVE_PROT", "EDGE_NODE_SERVE_PORT"),
    ],
)
def test_a_wrong_variable_is_named_with_the_remedy(
    name: str, value: str, why: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    result = here("serve", "bundle")
    assert result.returncode == 2
    assert why in result.stderr
    assert remedy in result.stderr
    assert here("infer", "--help").returncode == 0  # other commands do not care


def test_what_is_typed_wrong_is_not_put_down_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_NODE_SERVE_PORT", "9000")
    result = here("serve", "bundle", "--port", "many")
    assert result.returncode == 2
    assert "--port" in result.stderr
    assert "EDGE_NODE_SERVE_PORT" not in result.stderr


def test_a_wrong_variable_of_a_command_below_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_NODE_BUNDLE_ADD_LNIE", "press")
    assert "EDGE_NODE_BUNDLE_ADD_LINE" in here("bundle", "add", "bundle").stderr


def test_lists_and_switches_can_be_set_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as PATH is written
    monkeypatch.setenv("EDGE_NODE_INFER_IMAGES", f"{tmp_path}/a b.png:{tmp_path}/c.png")
    monkeypatch.setenv("EDGE_NODE_INFER_JSON", "true")
    tiny_bundle(tmp_path / "bundle")
    result = here("infer", tmp_path / "bundle")
    assert [
        f"{name}.png" in line
        for name, line in zip(("a b", "c"), result.stdout.splitlines(), strict=True)
    ]


def test_a_switch_of_the_whole_command_line_has_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_NODE_VERSION", "1")
    assert "Usage" in here("serve", "--help").stdout


def test_each_option_has_the_variable_that_its_name_says_and_none_that_of_a_secret() -> None:
    found = Counter[str]()
    for words, command in commands(command_tree(app)):
        for each in command.params:
            option = (
                each.name if each.param_type_name == "argument" else each.opts[0].removeprefix("--")
            )
            assert each.envvar[0] == f"EDGE_NODE_{words}_{option}".upper().translate(
                str.maketrans("- ", "__")
            )
            found.update(each.envvar)
    assert [name for name, count in found.items() if count > 1] == []
    assert not {
        secret_environment.PASSWORD,
        secret_environment.PASSPHRASE,
        secret_environment.HTTP_TOKEN,
    } & set(found)
