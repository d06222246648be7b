"""Environment variables of options and arguments: EDGE_NODE_COMMAND_OPTION, which click reads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import typer

from broker_config.protocol.errors import UsageError, suggest
from edge.config.options_file import earlier_keys, option_key
from edge.config.retired import find_remedy


def variable(words: str, key: str) -> str:
    """Return the variable that sets a command's option: serve,
    accept-older -> EDGE_NODE_SERVE_ACCEPT_OLDER.
    """
    return f"EDGE_NODE_{words}_{key}".upper().replace("-", "_").replace(" ", "_")


def name_variables(command: Any, words: str) -> None:
    """Give every option and argument of a command (`words`), and of those below it, its variable.

    click's own `auto_envvar_prefix` would name variables after Python's parameters (AS_JSON for
    --json), leave out arguments, and let EDGE_NODE_VERSION end every command with the version.
    """
    for name, below in getattr(command, "commands", {}).items():
        name_variables(below, f"{words} {name}")
    for parameter in command.params:
        keys = [option_key(parameter), *earlier_keys(parameter)]
        parameter.envvar = [variable(words, key) for key in keys]
        parameter.show_envvar = False  # the help would say the name of every option twice


def refuse_unknown_variables(command: Any, words: str) -> None:
    """Raise UsageError for a variable that is named like a command's, or one's below it,
    and sets nothing.
    """
    for name, below in getattr(command, "commands", {}).items():
        refuse_unknown_variables(below, f"{words} {name}")

    if hasattr(command, "commands"):
        return
    known = set(chain.from_iterable(parameter.envvar for parameter in command.params))
    prefix = variable(words, "")
    for name, text in os.environ.items():
        if not name.startswith(prefix) or text == "" or name in known:
            continue
        option = f"--{name.removeprefix(prefix)}".lower().replace("_", "-")
        remedy = find_remedy(words, option) or suggest(name, known)
        raise UsageError(f"{name} sets no option of edge-node {words}", remedy)


@contextmanager
def named_in_errors() -> Iterator[None]:
    """Raise UsageError with the variable's name where its value is wrong;
    click names only the option.
    """
    try:
        yield
    except typer.BadParameter as error:
        if not error.ctx or not error.param or not error.param.name:
            raise
        source = error.ctx.get_parameter_source(error.param.name)
        if source is None or source.name != "ENVIRONMENT":
            raise
        name = next(each for each in error.param.envvar or () if os.environ.get(each))
        text = os.environ[name]
        raise UsageError(
            f"{name}={text} cannot be: {error.message}", f"write another {name}, or unset it"
        ) from error
