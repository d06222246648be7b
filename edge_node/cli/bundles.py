"""A line's bundles: `bundle list`, `add`, `activate`, `rollback`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from edge_node.cli.line import State, TrustFile, choose, make_verifier, state_folder
from edge_node.cli.shared_options import Json

if TYPE_CHECKING:
    from edge.registry.bundle_store import BundleStore
    from edge.registry.control_requests import Answer, Request

app = typer.Typer()
group = typer.Typer(no_args_is_help=True)
app.add_typer(
    group,
    name="bundle",
    help="A line's bundles: list them, and change the one that is served while the line runs.",
    epilog="Example: edge-node bundle list",
)

_PATIENCE = 120.0  # seconds for a daemon to test a bundle

LINE = "line-1"  # as serve calls a line

Line = Annotated[
    str | None,
    typer.Option(help="Name of the line.", show_default=f"{LINE}, if it is the only one"),
]
Bundle = Annotated[Path, typer.Argument(help="A bundle folder.", show_default=False)]


class _Found(NamedTuple):
    """A line's store, and the state folder that it is in."""

    store: "BundleStore"
    state: Path


@group.command("list", epilog="Example: edge-node bundle list")
def list_(line: Line = None, state: State = None, as_json: Json = False) -> None:
    """Show the bundles of a line, the one it serves, and the one it would roll back to."""
    import msgspec

    from edge.registry.bundle_listing import format_bundles, list_bundles

    store = _find_store(state, line).store
    if as_json:
        print(msgspec.json.encode(list_bundles(store)).decode())
    else:
        print(*format_bundles(store), sep="\n")


@group.command(epilog="Example: edge-node bundle add bundles/plant-a")
def add(bundle: Bundle, line: Line = None, state: State = None, as_json: Json = False) -> None:
    """Put a bundle into a line's store, without serving it."""
    from edge.registry.control_requests import Answer

    store = _find_store(state, line, is_new=True).store
    digest = store.add(bundle, _requester())
    command = ["edge-node", "bundle", "activate", digest]
    if line:
        command += ["--line", line]
    if state:
        command += ["--state", str(state)]
    text = f"{digest} is in {store.folder}; next: {shlex.join(command)}"
    print_answer(Answer(done=True, text=text), as_json=as_json)


@group.command(epilog="Example: edge-node bundle activate 3fa9c0")
def activate(
    digest: Annotated[
        str, typer.Argument(metavar="DIGITS", help="First digits of a bundle.", show_default=False)
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help=(
                "Activate it even if it is slower, disagrees, has other classes or has "
                "failed before."
            ),
        ),
    ] = False,
    accept_older: Annotated[
        bool,
        typer.Option(
            "--accept-older",
            help="Activate it even if it is older than what was served; this one only.",
        ),
    ] = False,
    line: Line = None,
    trust: TrustFile = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Serve another bundle: the running line tests it, and switches between two images.

    While no line runs, it is tested here as far as possible, and served from the next start on.
    """
    from edge.registry.control_requests import Request

    found = _find_store(state, line)
    request = Request(
        action="activate",
        by=_requester(),
        bundle=found.store.resolve(digest),
        force=force,
        accept_older=accept_older,
    )
    print_answer(_submit(found, request, trust), as_json=as_json)


@group.command(epilog="Example: edge-node bundle rollback")
def rollback(
    line: Line = None, trust: TrustFile = None, state: State = None, as_json: Json = False
) -> None:
    """Serve the bundle that was served before."""
    from edge.registry.control_requests import Request

    request = Request(action="rollback", by=_requester())
    print_answer(_submit(_find_store(state, line), request, trust), as_json=as_json)


def _find_store(state: Path | None, line: str | None, *, is_new: bool = False) -> "_Found":
    """Find a line's store: where it is given, or the only one of those here.

    The lines here are those that run, wherever their state is, and those that have a store in the
    default folder. A line that has not been served yet may be `new`: it has no store.

    Raises:
        UsageError: there is none, or there are several and nobody to ask.
    """
    from broker_config.protocol.errors import UsageError
    from edge.registry.bundle_store import line_store, list_lines, running_lines

    name = line or LINE
    if state:
        return _Found(_open_store(state, name), state)
    default = state_folder()
    here = sorted({*running_lines(), *list_lines(default)})
    found = [each for each in here if line in (None, each[1])]
    if len(found) > 1:
        what = f"lines called {line}" if line else "lines"
        found = [choose(what, found, _format_line)]
    elif found and line is None and found[0][1] != LINE:
        found = []
    elif not found and (line_store(default, name).folder.exists() or (is_new and not here)):
        found = [(default, name)]
    if found:
        ((folder, name),) = found
        return _Found(_open_store(folder, name), folder)
    options = (
        f"name one that is here: {' or '.join(map(_format_line, here))}"
        if here
        else (
            "name it as the line is started: --line NAME --state FOLDER (a service has "
            "/var/lib/NAME)"
        )
    )
    raise UsageError(f"no line called {name} has its state in {default}", options)


def _format_line(found: tuple[Path, str]) -> str:
    return f"--line {found[1]} --state {found[0]}"


def _open_store(state: Path, line: str) -> "BundleStore":
    from edge.registry.bundle_store import line_store

    store = line_store(state, line)
    store.check_owner()
    return store


def _submit(found: "_Found", request: "Request", trust: Path | None) -> "Answer":
    """Have a request carried out: by the daemon or, while none runs, here."""
    from edge.registry import control_requests
    from edge.registry.bundle_store import StoreInUseError

    store = found.store
    try:
        with store.lock():
            return control_requests.apply_offline(
                store,
                request,
                make_verifier(trust, found.state, request.accept_older, remembers=True),
            )
    except StoreInUseError:
        return control_requests.send_request(store.folder, request, _PATIENCE, store.is_locked)


def print_answer(answer: "Answer", *, as_json: bool) -> None:
    """Print the answer; raise an error if the request was not carried out."""
    import msgspec

    from broker_config.protocol.errors import EdgeNodeError

    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        text = answer.text if answer.done else ""
        print(*(f"- {finding}" for finding in answer.findings), text, sep="\n")
    if not answer.done:
        raise EdgeNodeError(f"it is not served: {answer.text}", answer.remedy)


def _requester() -> str:
    """Who makes the request, for the history."""
    import getpass
    import os

    try:
        return f"{getpass.getuser()}, by edge-node bundle"
    except (KeyError, OSError):  # a user without a name, as in containers
        return f"user {os.getuid()}, by edge-node bundle"
