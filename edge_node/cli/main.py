"""The command line `edge-node`: its groups of commands, and how errors end it."""

import io
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from broker_config.protocol.errors import EdgeNodeError, UsageError, explain, replace_unprintable
from broker_config.registry import Registry
from edge_node.cli.environment import refuse_unknown_variables
from edge_node.cli.help_panels import PanelledGroup

# files and connections that a process must be allowed: libraries abort it when they get none
_FEWEST_FILES = 64

app = typer.Typer(
    name="edge-node",
    cls=PanelledGroup,
    help=(
        "Plants learn together to recognise surface defects, without any image leaving the "
        "building; then each recognises them live."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: Registry[typer.Typer] = Registry("commands")


def _registered() -> Iterator[typer.Typer]:
    for name in COMMANDS:
        try:
            yield COMMANDS[name]
        except UsageError as broken:  # one package's; all other commands work
            print(f"edge-node: {broken}", file=sys.stderr)


def _add_commands(found: Sequence[typer.Typer]) -> None:
    """Add the commands of what is registered.

    Those of an app that has the name of another one's group, `Typer(name="bundle")`, go into that
    group.
    """
    groups: dict[Any, typer.Typer | None] = {}
    for each in found:
        for group in each.registered_groups:
            groups[group.name] = group.typer_instance
    for each in found:
        group_of_that_name = groups.get(each.info.name)
        if group_of_that_name:
            group_of_that_name.add_typer(each, name=None)
        else:
            app.add_typer(each)


_add_commands([*_registered()])


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("edge-node"))
        raise typer.Exit


@app.callback()
def settings(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of every command."""
    if 0 <= (most := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _FEWEST_FILES:
        raise EdgeNodeError(
            f"this process may open only {most} files and connections",
            "raise the limit: ulimit -n 4096, or LimitNOFILE= in a service",
        )
    if name := context.invoked_subcommand:
        refuse_unknown_variables(command_tree(app).commands[name], name)


@cache
def command_tree(commands: typer.Typer) -> Any:
    """The click group of a command line.

    Building it takes longer than parsing, so it is built once a process.
    """
    return typer.main.get_command(commands)


def main() -> None:
    """Run `edge-node`."""
    run(app)


def run(commands: typer.Typer, name: str = "edge-node") -> None:
    """Run a command line; errors are shown without a traceback, unless --debug asks for it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal without UTF-8 shows escapes, as in stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            command_tree(commands)()
        finally:
            if sys.stdout is not None:  # closed by the shell: >&-
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed the pipe
        _discard_output()
        sys.exit(EdgeNodeError.exit_code)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, OSError):
            _discard_output()
        explained = explain(error)
        print(replace_unprintable(f"{name}: {explained}"), file=sys.stderr)
        sys.exit(explained.exit_code)


def _discard_output() -> None:
    """Drop what standard output did not take: Python would try to write it again when the
    process ends.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
