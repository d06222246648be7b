"""A command's options in a TOML file.

What there is to set, and its type, come from the command itself. Keys are the long options without
their dashes, and the names of arguments. What is typed beats the environment, which beats the file.
"""

import json
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
    hints = get_type_hints(command.callback)
    found = {option_key(each): Setting(each, _kind(hints[each.name])) for each in command.params}
    found.pop("config", None)
    return found


def option_key(parameter: Any) -> str:
    """Return what a file calls an option or argument of typer's."""
    if parameter.param_type_name == "argument":
        return str(parameter.name)
    return str(parameter.opts[0].lstrip("-"))


def earlier_keys(parameter: Any) -> list[str]:
    """Return what files called an option of typer's before, and still may."""
    return [name.lstrip("-") for name in parameter.opts[1:] if name.startswith("--")]


def _kind(hint: Any) -> type:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [each for each in get_args(hint) if each is not type(None)]
    origin = get_origin(hint)
    if origin is None:
        plain: type = hint
        return plain
    return list if origin is list else str  # the rest are literals


def read(file: Path, context: typer.Context) -> dict[str, Any]:
    """The options of the context's command in a file, by typer's names.

    An empty text stands for an option not given.

    Relative paths start at the file's folder.

    Raises:
        UsageError: the file cannot be read, has a key that the command has not, or a value that
            does not fit.
    """
    return options(load(file), file, context)


def options(given: Mapping[str, Any], file: Path, context: typer.Context) -> dict[str, Any]:
    """As `read`, of a file's keys that were read already."""
    known = settings(context.command)
    renamed: dict[str, str] = {}
    for each in context.command.params:
        renamed |= dict.fromkeys(earlier_keys(each), option_key(each))
    values = {}
    for written, value in given.items():
        key = renamed.get(written, written)
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
            raise UsageError(
                f"{file}: {key} = {shown} does not fit", f"write {_WRITTEN[setting.kind]} for {key}"
            )
        if isinstance(value, str) and setting.is_path(value):
            value = str(file.parent / value)  # noqa: PLW2901
        try:
            setting.parameter.process_value(context, value)
        except typer.BadParameter as error:
            raise UsageError(
                f"{file}: {key} = {json.dumps(value)} cannot be: {error.message}",
                f"write another {key}",
            ) from error
        values[setting.parameter.name] = value
    return values


def load(file: Path) -> dict[str, Any]:
    """What a TOML file says; UsageError when it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", "pass another --config FILE"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text ({error})", "save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{file} is not TOML: {error}",
            'write each option as key = value on a line of its own, texts in "quotes"',
        ) from error
