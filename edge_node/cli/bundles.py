"""A line's bundles: `bundle list`, `add`, `activate`, `rollback`, `send`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_node.cli.line import Memory, TrustFile, make_verifier, state_folder
from edge_node.cli.shared_options import Ca, Cert, Json, Key

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

Line = Annotated[str, typer.Option(help="Name of the line.")]
Bundle = Annotated[Path, typer.Argument(help="A bundle folder.", show_default=False)]


@group.command("list", epilog="Example: edge-node bundle list")
def list_(line: Line = "line-1", memory: Memory = None, as_json: Json = False) -> None:
    """Show the bundles of a line, the one it serves, and the one it would roll back to."""
    import msgspec

    from edge.registry.bundle_listing import format_bundles, list_bundles

    store = _store(_find_memory(memory, line), line)
    if as_json:
        print(msgspec.json.encode(list_bundles(store)).decode())
    else:
        print(*format_bundles(store), sep="\n")


@group.command(epilog="Example: edge-node bundle add bundles/plant-a")
def add(
    bundle: Bundle, line: Line = "line-1", memory: Memory = None, as_json: Json = False
) -> None:
    """Put a bundle into a line's store, without serving it."""
    from edge.registry.control_requests import Answer

    digest = _store(_find_memory(memory, line, is_new=True), line).add(bundle, _requester())
    _print_answer(
        Answer(
            done=True, text=f"{digest} is in the store; next: edge-node bundle activate {digest}"
        ),
        as_json=as_json,
    )


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
    line: Line = "line-1",
    trust: TrustFile = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Serve another bundle: the running line tests it, and switches between two images.

    While no line runs, it is tested here as far as possible, and served from the next start on.
    """
    from edge.registry.control_requests import Request

    memory = _find_memory(memory, line)
    store = _store(memory, line)
    request = Request(
        action="activate",
        by=_requester(),
        bundle=store.resolve(digest),
        force=force,
        accept_older=accept_older,
    )
    _print_answer(_submit(store, request, trust, memory), as_json=as_json)


@group.command(epilog="Example: edge-node bundle rollback")
def rollback(
    line: Line = "line-1", trust: TrustFile = None, memory: Memory = None, as_json: Json = False
) -> None:
    """Serve the bundle that was served before."""
    from edge.registry.control_requests import Request

    memory = _find_memory(memory, line)
    _print_answer(
        _submit(_store(memory, line), Request(action="rollback", by=_requester()), trust, memory),
        as_json=as_json,
    )


@group.command(
    epilog="Example: edge-node bundle send bundles/plant-a mqtt://line-box.local --line line-1"
)
def send(
    bundle: Bundle,
    broker: Annotated[
        str,
        typer.Argument(metavar="BROKER_URL", help="The plant's own broker.", show_default=False),
    ],
    line: Line = "line-1",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Send a signed bundle to a line over the plant's own broker.

    A federation's broker is refused.
    """
    from broker_config.mqtt.endpoint import Endpoint
    from edge.registry import bundle_sender
    from edge.registry.control_requests import Answer

    def show(text: str) -> None:
        print(text, file=sys.stderr)

    said = bundle_sender.send_bundle(
        bundle, Endpoint.parse(broker, ca=ca, cert=cert, key=key), line, show
    )
    done = said.state in ("active", "stored")
    _print_answer(
        Answer(done=done, text=said.text, remedy=said.remedy, findings=said.findings),
        as_json=as_json,
    )


def _find_memory(memory: Path | None, line: str, *, is_new: bool = False) -> Path:
    """The state folder of a line: as given, or of the one that runs, or the default;
    UsageError where that is unclear.

    A line that has not been served yet may be `new`: it has no store.
    """
    from broker_config.protocol.errors import UsageError
    from edge.registry.bundle_store import line_store, running_lines

    if memory:
        return memory
    running = running_lines()
    found = [folder for folder, name in running if name == line]
    if len(found) == 1:
        return found[0]
    default = state_folder()
    options = " or ".join(f"--line {name} --memory {folder}" for folder, name in running)
    if found:
        raise UsageError(f"{len(found)} lines called {line} run here", f"say which one: {options}")
    if line_store(default, line).folder.exists() or (is_new and not running):
        return default
    options_text = (
        f"name one that runs here: {options}"
        if options
        else (
            "name it as the line is started: --line NAME --memory FOLDER (a service has "
            "/var/lib/NAME)"
        )
    )
    raise UsageError(f"there is no line {line} in {default}", options_text)


def _store(memory: Path, line: str) -> "BundleStore":
    from edge.registry.bundle_store import line_store

    store = line_store(memory, line)
    store.check_owner()
    return store


def _submit(store: "BundleStore", request: "Request", trust: Path | None, memory: Path) -> "Answer":
    """Have a request carried out: by the daemon or, while none runs, here."""
    from edge.registry import control_requests
    from edge.registry.bundle_store import StoreInUseError

    try:
        with store.lock():
            return control_requests.apply_offline(
                store, request, make_verifier(trust, memory, request.accept_older, remembers=True)
            )
    except StoreInUseError:
        return control_requests.send_request(store.folder, request, _PATIENCE, store.is_locked)


def _print_answer(answer: "Answer", *, as_json: bool) -> None:
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
