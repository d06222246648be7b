"""Commands of the coordinator: `provision`, `broker`, `coordinate`, `console`, `rounds`,
`pause` to `abort`.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge_node.cli.help_panels import Panel
from edge_node.cli.option_structs import take_options
from edge_node.cli.shared_options import (
    BrokerOptions,
    Config,
    Http,
    Json,
    RequestOptions,
    RoundOptions,
    TrackedOutputOptions,
    check_model_is_free,
    end_on_signals,
    parse_pairs,
    reconcile_with_kit,
    report_weights,
    stop_on_signals,
)

if TYPE_CHECKING:
    from broker_config.mqtt.endpoint import Endpoint
    from broker_config.protocol.messages import Encryption, Spec
    from trainer.federation.server.choosing_runs import Federation
    from trainer.federation.server.coordinator.process import Outcome
    from trainer.federation.server.operator_actions import Kind
    from trainer.federation.server.spec import Request
    from trainer.models.named_tensors import Arrays
    from trainer.progress import Report

app = typer.Typer()


class ProvisionOptions(Struct, frozen=True, kw_only=True):
    """What an administrator changes in a federation."""

    federation: Annotated[str, typer.Argument(help="Name of the federation.", show_default=False)]
    request: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="What edge-node request has written at a member: it may take part. Repeatable.",
        ),
    ] = []
    nodes: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME",
            help="For trials: nodes that may join, with keys that are made here.",
        ),
    ] = ""
    host: Annotated[
        list[str],
        typer.Option(
            help=(
                "Name or address at which the broker is reached; may be given several times, "
                "kits name the first."
            ),
            show_default="as before",
        ),
    ] = []
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the broker.", show_default="as before; 8883"),
        Panel.BROKER,
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Folder for all files.", show_default="./FEDERATION")
    ] = None
    broker_folder: Annotated[
        Path | None,
        typer.Option(
            help="Path of broker/ on the broker's machine.", show_default="as before; where it is"
        ),
        Panel.BROKER,
    ] = None
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="Days for which new certificates are valid.")
    ] = 365
    renew: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="Give a member, or broker, a new certificate. Repeatable."
        ),
    ] = []
    renew_due: Annotated[
        bool, typer.Option("--renew-due", help="Renew all certificates that expire within 90 days.")
    ] = False
    revoke: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help=(
                "Exclude a node; with its new --request, replace its keys; coordinator and "
                "monitor get new keys. Repeatable."
            ),
        ),
    ] = []
    as_json: Json = False


@app.command(
    epilog=(
        "Example: edge-node provision steel --request plant-a.request --request plant-b.request "
        "--host broker.local"
    )
)
@take_options
def provision(options: ProvisionOptions) -> None:
    """Certify the keys that members have made (edge-node request),
    and write the broker's configuration.

    For trials it makes the keys of --nodes, too. Run it again to add nodes, renew certificates or
    revoke them: it reports what has changed, and what to do next.
    """
    from datetime import UTC, datetime

    import msgspec

    from broker_config.security import certificate_request
    from broker_config.security.member_registry import ChangeRequest
    from broker_config.security.provisioning import provision as run
    from edge.status.provisioning_report import json_object, text_lines

    folder = options.out or Path(options.federation)
    now = datetime.now(UTC)
    broker_folder = str(options.broker_folder.absolute()) if options.broker_folder else None
    change = ChangeRequest(
        requests=[certificate_request.read(path) for path in options.request],
        nodes=[name.strip() for name in options.nodes.split(",") if name.strip()],
        hosts=options.host,
        port=options.port,
        broker_folder=broker_folder,
        days=options.days,
        renew=options.renew,
        renew_due=options.renew_due,
        revoke=options.revoke,
    )
    done = run(folder, options.federation, change, now)
    if options.as_json:
        print(msgspec.json.encode(json_object(folder, done)).decode())
    else:
        print(*text_lines(folder, done, as_root=os.geteuid() == 0), sep="\n")


@app.command(epilog="Example: edge-node broker --port 1883")
def broker(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 1883,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Whoever can reach it may connect.")
    ] = "127.0.0.1",
    kind: Annotated[
        Literal["auto", "mosquitto", "amqtt"], typer.Option(help="Broker to start.")
    ] = "auto",
    folder: Annotated[Path, typer.Option(help="Folder for its configuration and log.")] = Path(
        "broker-state"
    ),
) -> None:
    """Start a broker: mosquitto if it is installed, else the embedded one.

    For trials; it checks no passwords.
    """
    import time

    from broker_config.broker.embedded import address_for_others, start_broker

    stop = stop_on_signals()
    with start_broker(folder, port=port, host=host, kind=kind) as running:
        print(f"{running.kind} is listening on {running.url}; Ctrl-C ends it", flush=True)
        if others := address_for_others(host):
            print(f"other machines reach it at mqtt://{others}:{running.port}", flush=True)
        while not stop():
            if running.process.poll() is not None:
                raise EdgeNodeError("the broker has ended", f"see its log in {folder}")
            time.sleep(0.2)


def _count_nodes(endpoint: "Endpoint", begun: "Spec | None") -> int:
    """The default number of nodes: as many as before, or all that are in the charter."""
    if endpoint.signer is None:
        raise UsageError("the number of nodes is missing", "say with --nodes how many take part")
    return begun.nodes if begun else len(endpoint.signer.members.nodes)


def _choose_encryption(
    wanted: "Encryption | None", endpoint: "Endpoint", begun: "Spec | None"
) -> "Encryption":
    """What is left open is as in the run that goes on;
    a new one is encrypted where its members have kits.
    """
    if wanted:
        return wanted
    if begun:
        return begun.encryption
    return "group" if endpoint.signer else "none"


def _check_choice(wanted: RequestOptions, begun: "Spec | None", *, is_due: bool) -> None:
    """Raise UsageError if no encoder can be chosen, or one is being chosen and that is not
    wanted.
    """
    if is_due:
        check_model_is_free(wanted)
    elif begun and begun.chooses:
        raise UsageError(
            "the newest run of this state folder only chooses an encoder",
            "add --weights auto to go on with it, or begin another run with --new",
        )


def _draft(
    federation: "Federation", request: "Request", output: TrackedOutputOptions
) -> "tuple[Spec, Arrays]":
    """Make the spec and the first broadcast, which takes seconds."""
    from trainer import progress

    with progress.reporter(as_json=output.as_json, quiet=output.quiet) as report:
        report(progress.Step(what="making the first broadcast: 2 to 20 s"))
        return federation.draft(request)


class CoordinateOptions(Struct, frozen=True, kw_only=True):
    """The federation, and who takes part in it."""

    classes: Annotated[
        str, typer.Option(help="Class names, separated by commas.", show_default=False)
    ]
    alias: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=CLASS",
            help="A class's name at some plant, e.g. Kratzer=scratches. Repeatable.",
        ),
        Panel.IMAGES,
    ] = []
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Nodes that take part.", show_default="those of the kit's charter"
        ),
    ] = None
    federation: Annotated[
        str | None,
        typer.Option(help="Name of the federation.", show_default="the kit's, or default"),
    ] = None
    encryption: Annotated[
        Literal["group", "none"] | None,
        typer.Option(
            help=(
                "Whether what is learnt is encrypted for the members, so that the broker cannot "
                "read it: group needs kits, and this version of edge-node at all nodes."
            ),
            show_default="group with a kit, else none",
        ),
        Panel.BROKER,
    ] = None
    http: Http = None
    state: Annotated[Path, typer.Option(help="Folder for the coordinator's state.")] = Path(
        "coordinator-state"
    )
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--new", help="Resume the run in --state, or begin another when it has ended."
        ),
    ] = True
    config: Config = None


@app.command(
    epilog=(
        "Example: edge-node coordinate mqtt://broker.local --nodes 5 --classes "
        "scratches,patches,inclusion"
    )
)
@take_options
def coordinate(
    broker: BrokerOptions,
    output: TrackedOutputOptions,
    round_options: RoundOptions,
    options: CoordinateOptions,
    wanted: RequestOptions,
) -> None:
    """Coordinate a federation: publish its spec, wait for the nodes, average their contributions.

    If stopped or killed, it resumes when it is started again with the same --state. With --weights
    auto the nodes first compare encoders and input sizes on their images, in short runs of the same
    federation, and go on by themselves to the run with the best.
    """
    from broker_config.storage import disk
    from trainer import progress
    from trainer.console.console_process import console_beside
    from trainer.federation.server import choosing_runs
    from trainer.federation.server.coordinator.process import coordinate as run
    from trainer.federation.server.journal import has_run, newest_run
    from trainer.federation.server.ledger import Ledger
    from trainer.models.initial_weights import choose_weights
    from trainer.statistics.encoder_choice import AUTO
    from trainer.training.privacy_plan import describe as describe_privacy

    end_on_signals()  # until the run begins, there is nothing to leave in order
    endpoint = broker.coordinator_endpoint()
    state = options.state
    disk.check_writable(state)
    begun = newest_run(state).spec if options.resume and has_run(state) else None
    has_wanted = begun is not None and not begun.chooses
    is_due = wanted.weights == AUTO and not has_wanted
    _check_choice(wanted, begun, is_due=is_due)
    resuming = wanted.resuming(begun) if begun and has_wanted else wanted
    request = resuming.request()
    if wanted.weights == AUTO:  # until it is chosen; what is wrong beside is said before any run
        request = request._replace(weights=choose_weights(request.model))
    federation = choosing_runs.Federation(
        name=reconcile_with_kit(options.federation, endpoint, "federation") or "default",
        classes=[name.strip() for name in options.classes.split(",") if name.strip()],
        nodes=options.nodes or _count_nodes(endpoint, begun),
        participation=round_options.participation(),
        aliases=parse_pairs(options.alias, "--alias", "{}=scratches"),
        encryption=_choose_encryption(options.encryption, endpoint, begun),
    )
    spec, broadcast = _draft(federation, request, output)
    stop = stop_on_signals()
    with (
        output.reporter() as report,
        Ledger(state) as ledger,
        console_beside(state, options.http, report),
    ):

        def coordinate_run(
            spec: "Spec", broadcast: "Arrays", report: "Report", new: bool
        ) -> "Outcome | None":
            linger = round_options.linger
            return run(ledger, spec, broadcast, endpoint, report, new=new, linger=linger, stop=stop)

        earlier = ledger.run
        new = not options.resume
        choice = None
        outcome = None
        if is_due:
            choice = choosing_runs.choose_encoder(
                ledger, federation, request, wanted.size, coordinate_run, report, new=new
            )
        if choice:
            chosen = choice.chosen
            request = request._replace(model=chosen.model, weights=chosen.weights, size=chosen.size)
            spec, broadcast = federation.draft(request)
            new = True
        if choice or not is_due:
            report_weights(request, wanted.weights, report)
            if spec.privacy:
                report(progress.Note(text=describe_privacy(spec)))
            outcome = coordinate_run(spec, broadcast, report, new)
        if outcome:
            average = ledger.save_result()
            costs = [each._asdict() for each in choice.costs] if choice else []
            encoder_costs = {"encoders": costs} if costs else {}
            report(progress.Result(result={"model": str(average)} | encoder_costs))
        has_begun = ledger.run is not None and (options.resume or ledger.run is not earlier)
    if outcome is None:
        same = "The same command" if options.resume else "The same command without --new"
        suspended = f"suspended; the nodes wait. {same} goes on, edge-node abort ends the run."
        text = suspended if has_begun else "ended before the run began"
        print(text, file=sys.stderr)
        raise typer.Exit(130)
    if not output.as_json:
        print(f"global model: {average}")


@app.command(epilog="Example: edge-node console coordinator-state")
def console(
    states: Annotated[
        list[Path],
        typer.Argument(
            metavar="STATE...", help="State folders of coordinators or heads.", show_default=False
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8090,
    allow_host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="Further name by which it is called, such as a reverse proxy's."
        ),
    ] = [],
) -> None:
    """Show federations as a page, while they run and afterwards: nodes, rounds, charts,
    two runs side by side.
    """
    from edge.http.access import Access
    from edge.http.server import listen
    from trainer.console.console import open_folder, serve

    folders = [open_folder(state) for state in states]
    with listen(host, port) as listener:
        serve(folders, listener, Access.of(host, allow_host, ""))


@app.command(epilog="Example: edge-node rounds coordinator-state")
def rounds(
    state: Annotated[Path, typer.Argument(help="A coordinator's state folder.")] = Path(
        "coordinator-state"
    ),
    as_json: Json = False,
) -> None:
    """List the closed rounds of a coordinator's newest run: time, duration,
    contributors and their weights.
    """
    from datetime import datetime

    import msgspec

    from trainer.federation.server.journal import history, newest_run

    closed_rounds = history(state)
    # then nobody knows a weight
    is_masked = bool(closed_rounds) and newest_run(state).spec.mask_threshold > 0
    for each in closed_rounds:
        if as_json:
            print(msgspec.json.encode(each).decode())
            continue
        opened, closed = (datetime.fromisoformat(time) for time in (each.opened, each.closed))
        seconds = (closed - opened).total_seconds()
        megabytes = each.bytes / 1e6
        if is_masked:
            who = f"contributors: {', '.join(each.weights)}"
        else:
            who = "weights: " + ", ".join(
                f"{node} {weight:.3f}" for node, weight in each.weights.items()
            )
        print(
            f"round {each.round}: {opened:%Y-%m-%d %H:%M:%S} UTC, {seconds:.1f} s, "
            f"{megabytes:.1f} MB, {who}"
        )
    if not closed_rounds and not as_json:
        print("no round is closed yet", file=sys.stderr)


State = Annotated[Path, typer.Option(help="Folder of the coordinator's state.")]


@app.command(epilog="Example: edge-node pause --state coordinator-state")
def pause(state: State = Path("coordinator-state"), as_json: Json = False) -> None:
    """Pause a federation that runs: no round opens or closes until `resume`, over restarts, too."""
    _operate(state, "pause", as_json=as_json)


@app.command(epilog="Example: edge-node resume --state coordinator-state")
def resume(state: State = Path("coordinator-state"), as_json: Json = False) -> None:
    """Let the rounds of a paused federation go on:
    they come to what they would have without the pause.
    """
    _operate(state, "resume", as_json=as_json)


@app.command(epilog="Example: edge-node drop plant-c --state coordinator-state")
def drop(
    node: Annotated[str, typer.Argument(help="Node to drop.", show_default=False)],
    state: State = Path("coordinator-state"),
    as_json: Json = False,
) -> None:
    """Let a federation that runs go on without a node, which cannot come back in this run."""
    _operate(state, "drop", node, as_json=as_json)


@app.command(epilog="Example: edge-node abort mqtt://broker.local --state coordinator-state")
@take_options
def abort(
    broker: BrokerOptions,
    state: State = Path("coordinator-state"),
    reason: Annotated[
        str,
        typer.Option(help="Reason, shown to the nodes' owners.", show_default="USER has ended it"),
    ] = "",
    as_json: Json = False,
) -> None:
    """End a federation early, for the coordinator and its nodes, which are left without a model.

    BROKER_URL, or a kit, is needed where the federation is suspended: while its coordinator runs,
    that tells the nodes.
    """
    from broker_config.storage import disk

    if disk.is_locked(state):
        _operate(state, "abort", reason=reason, as_json=as_json)
        return
    import msgspec

    from trainer.federation.server.coordinator.process import abort as run
    from trainer.federation.server.journal import newest_run
    from trainer.federation.server.ledger import Ledger
    from trainer.federation.server.operator_actions import make_action

    spec = newest_run(state).spec
    done = make_action(spec.run, "abort", _user(), reason=reason)
    with Ledger(state) as ledger:
        run(ledger, broker.coordinator_endpoint(), reason or f"{done.by} has ended it")
    if as_json:
        print(msgspec.json.encode(done).decode())
    else:
        print(f"federation {spec.federation} is aborted; its nodes are told")


def _operate(
    state: Path, what: "Kind", node: str | None = None, *, reason: str = "", as_json: bool
) -> None:
    """Have the coordinator do something, and say so."""
    import msgspec

    from trainer.federation.server import operator_actions

    done = operator_actions.request(state, what, _user(), node, reason=reason)
    if as_json:
        print(msgspec.json.encode(done).decode())
    else:
        print(f"the coordinator is told to {what} {node or 'the run'}, and does so within a second")


def _user() -> str:
    """Who types this, as a name that fits into messages."""
    import getpass
    import os
    import re

    try:
        found = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        found = f"user-{os.getuid()}"
    return re.sub(r"[^A-Za-z0-9_.-]", "-", found).lstrip("_.-")[:64] or "somebody"
