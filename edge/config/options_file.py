"""A command's options in a TOML file or the environment, and the composition of a file that explains each of them.

What there is to set, its type, default and explanation come from the command itself. Keys are the long options without
their dashes, and the names of arguments; variables of the environment are EDGE_NODE_COMMAND_KEY. What is typed beats
the environment, which beats the file.
"""

import json
import shlex
import textwrap
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer

from broker_config.protocol.errors import UsageError, suggest
from edge.config.retired import find_remedy

_WRITTEN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Path: "a text in quotes",
    list: 'a list of texts, ["like", "this"]',
}


class Setting(NamedTuple):
    """One option or argument of a command."""

    parameter: Any  # typer's
    kind: type  # bool, int, float, str, Path or list (of str)

    def fits(self, value: object) -> bool:
        """Whether a value in a file has the right type."""
        if isinstance(value, list):
            return self.kind is list and all(isinstance(item, str) for item in value)
        wanted: tuple[type, ...] = {Path: (str,), float: (int, float)}.get(self.kind, (self.kind,))
        return type(value) in wanted  # exactly: true is no number

    def is_path(self, text: str) -> bool:
        """Whether a text means a file or folder. Weights are named, or are a file."""
        return self.kind is Path or text.endswith(".safetensors")


def settings(command: Any) -> dict[str, Setting]:
    """What a file can set of a command of typer's, by key, in its order."""
    return {key: setting for key, setting in _parameters(command).items() if key != "config"}


def _parameters(command: Any) -> dict[str, Setting]:
    hints = get_type_hints(command.callback)
    found = {}
    for parameter in command.params:
        key = parameter.name if parameter.param_type_name == "argument" else parameter.opts[0].lstrip("-")
        found[key] = Setting(parameter, _kind(hints[parameter.name]))
    return found


def _kind(hint: Any) -> type:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [each for each in get_args(hint) if each is not type(None)]
    origin = get_origin(hint)
    return hint if origin is None else list if origin is list else str  # the rest are literals


def read(file: Path, context: typer.Context) -> dict[str, Any]:
    """The options of the context's command in a file, by typer's names. An empty text stands for an option not given.

    Relative paths start at the file's folder.

    Raises:
        UsageError: the file cannot be read, has a key that the command has not, or a value that does not fit.
    """
    return options(load(file), file, context)


def options(given: Mapping[str, Any], file: Path, context: typer.Context) -> dict[str, Any]:
    """As `read`, of a file's keys that were read already."""
    known = settings(context.command)
    values = {}
    for key, value in given.items():
        if key not in known:
            see = f"see edge-node {context.info_name} --help; {suggest(key, known)}"
            raise UsageError(
                f"{file}: edge-node {context.info_name} has no option {key!r}",
                find_remedy(str(context.info_name), f"--{key}") or see,
            )
        if value == "":
            continue
        setting = known[key]
        if not setting.fits(value):
            shown = json.dumps(value, default=str)
            raise UsageError(f"{file}: {key} = {shown} does not fit", f"write {_WRITTEN[setting.kind]} for {key}")
        if isinstance(value, str) and setting.is_path(value):
            value = str(file.parent / value)  # noqa: PLW2901
        try:
            setting.parameter.process_value(context, value)
        except typer.BadParameter as error:
            raise UsageError(
                f"{file}: {key} = {json.dumps(value)} cannot be: {error.message}", f"write another {key}"
            ) from error
        values[setting.parameter.name] = value
    return values


def variable(words: str, key: str) -> str:
    """The variable that sets a command's option: serve, accept-older -> EDGE_NODE_SERVE_ACCEPT_OLDER."""
    return f"EDGE_NODE_{words}_{key}".upper().replace("-", "_").replace(" ", "_")


def from_environment(
    environment: Mapping[str, str], words: str, command: Any, context: typer.Context
) -> dict[str, Any]:
    """The options of a command (`words`) in the environment, by typer's names; lists are split as a shell does.

    Those of a group of commands are by the commands' names. An empty text stands for an option not given; UsageError
    names a variable that does not fit.
    """
    if commands := getattr(command, "commands", None):
        return {
            name: from_environment(environment, f"{words} {name}", each, context) for name, each in commands.items()
        }
    known = {variable(words, key): setting for key, setting in _parameters(command).items()}
    prefix = variable(words, "")
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(prefix) or text == "":
            continue
        if name not in known:
            option = f"--{name.removeprefix(prefix)}".lower().replace("_", "-")
            raise UsageError(
                f"{name} sets no option of edge-node {words}", find_remedy(words, option) or suggest(name, known)
            )
        setting = known[name]
        value = shlex.split(text) if setting.kind is list else text
        try:
            if not setting.parameter.is_eager:  # as --config, which reads its file when its turn comes
                setting.parameter.process_value(context, value)
        except typer.BadParameter as error:
            raise UsageError(
                f"{name}={text} cannot be: {error.message}", f"write another {name}, or unset it"
            ) from error
        values[setting.parameter.name] = value
    return values


def load(file: Path) -> dict[str, Any]:
    """What a TOML file says; UsageError when it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", "pass another --config FILE; edge-node init writes one"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text ({error})", "save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{file} is not TOML: {error}", 'write each option as key = value on a line of its own, texts in "quotes"'
        ) from error


_HEAD = """\
# {about}
#
#     edge-node {command} --config {file}
#
# Each line sets an option of that command. One that begins with "#" right before its name sets
# nothing, and shows the default; "" stands for "not given". The command line beats this file.
# Relative paths start at this file's folder. No password belongs here: it comes from the
# environment, as EDGE_NODE_PASSWORD, and a kit's passphrase as EDGE_NODE_PASSPHRASE."""


def compose(command: Any, about: str, file: Path, values: Mapping[str, object]) -> str:
    """A file with these values, in which every other option stands as a comment, with its default and what it means.

    Args:
        command: typer's, whose options are set.
        about: what the file is for, a sentence.
        file: its name.
        values: by key.
    """
    blocks = [_HEAD.format(about=about, command=command.name, file=file.name)]
    for key, (parameter, _) in settings(command).items():
        default = parameter.default
        note = ""
        if isinstance(parameter.show_default, str):
            default, note = "", f" Default: {parameter.show_default}."
        value = values.get(key, "" if default is None else default)
        meaning = textwrap.fill(parameter.help + note, 96, initial_indent="# ", subsequent_indent="# ")
        blocks.append(f"{meaning}\n{'' if key in values else '#'}{key} = {_toml(value)}")
    return "\n\n".join(blocks) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # the rest of JSON's texts are TOML's
