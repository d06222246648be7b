"""Commands of the coordinator: `provision`, `broker`, `coordinate`, `rounds`, `abort`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.topics import COORDINATOR
from broker_config.storage import disk
from edge.cli.shared_options import (
    DEFAULT_METHOD,
    Aggregate,
    Broker,
    Ca,
    Cert,
    Config,
    EvaluateEvery,
    Events,
    Head,
    Json,
    Key,
    KitFile,
    Liars,
    Method,
    Model,
    Options,
    Quiet,
    Rounds,
    Seed,
    Settings,
    Size,
    Threads,
    Weights,
    check_model_is_free,
    make_endpoint,
    make_request,
    parse_pairs,
    reconcile_with_kit,
    report_weights,
    stop_on_signals,
)

if TYPE_CHECKING:
    from broker_config.mqtt.endpoint import Endpoint

app = typer.Typer()


@app.command(epilog="Example: edge-node provision steel --nodes plant-a,plant-b --host broker.local")
def provision(
    federation: Annotated[str, typer.Argument(help="Name of the federation.", show_default=False)],
    nodes: Annotated[str, typer.Option(metavar="NAME,NAME", help="Nodes that may join; more can be added later.")] = "",
    host: Annotated[
        list[str],
        typer.Option(
            help="Name or address at which the broker is reached; may be given several times, kits name the first.",
            show_default="as before",
        ),
    ] = [],
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the broker.", show_default="as before; 8883")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all files.", show_default="./FEDERATION")] = None,
    broker_folder: Annotated[
        Path | None,
        typer.Option(help="Path of broker/ on the broker's machine.", show_default="as before; where it is"),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days for which new certificates are valid.")] = 365,
    renew: Annotated[
        list[str], typer.Option(metavar="NAME", help="Give a member, or broker, a new certificate. Repeatable.")
    ] = [],
    renew_due: Annotated[
        bool, typer.Option("--renew-due", help="Renew all certificates that expire within 90 days.")
    ] = False,
    revoke: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="Exclude a node; coordinator and monitor get new keys. Repeatable."),
    ] = [],
    as_json: Json = False,
) -> None:
    """Make certificates, keys and the broker's configuration: an encrypted kit file for each member of a federation.

    Run it again to add nodes, renew certificates or revoke them: it reports what has changed, and what to do next.
    """
    from datetime import UTC, datetime

    import msgspec

    from broker_config.security.member_registry import ChangeRequest
    from broker_config.security.provisioning import provision as run
    from edge.status.provisioning_report import json_object, text_lines

    request = ChangeRequest(
        nodes=[name.strip() for name in nodes.split(",") if name.strip()],
        hosts=host,
        port=port,
        broker_folder=str(broker_folder.absolute()) if broker_folder else None,
        days=days,
        renew=renew,
        renew_due=renew_due,
        revoke=revoke,
    )
    folder = out or Path(federation)
    done = run(folder, federation, request, datetime.now(UTC))
    if as_json:
        print(msgspec.json.encode(json_object(folder, done)).decode())
    else:
        print(*text_lines(folder, done), sep="\n")


@app.command(epilog="Example: edge-node broker --port 1883")
def broker(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 1883,
    host: Annotated[str, typer.Option(help="Address to listen on. Whoever can reach it may connect.")] = "127.0.0.1",
    kind: Annotated[Literal["auto", "mosquitto", "amqtt"], typer.Option(help="Broker to start.")] = "auto",
    folder: Annotated[Path, typer.Option(help="Folder for its configuration and log.")] = Path("broker-state"),
) -> None:
    """Start a broker: mosquitto if it is installed, else the embedded one. For trials; it checks no passwords."""
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


def _check_kit(endpoint: "Endpoint") -> None:
    """Raise UsageError if the kit belongs to another member."""
    if endpoint.kit and endpoint.kit.name != COORDINATOR:
        raise UsageError(f"this kit is that of {endpoint.kit.name}", f"take that of the {COORDINATOR}")


def _count_nodes(endpoint: "Endpoint", state: Path, *, resume: bool) -> int:
    """The default number of nodes: as many as before, or all that are in the charter."""
    from trainer.federation.server.journal import has_run, newest_spec

    if endpoint.signer is None:
        raise UsageError("the number of nodes is missing", "say with --nodes how many take part")
    if resume and has_run(state):
        return newest_spec(state).nodes
    return len(endpoint.signer.members.nodes)


@app.command(epilog="Example: edge-node coordinate mqtt://broker.local --nodes 5 --classes scratches,patches,inclusion")
def coordinate(
    classes: Annotated[str, typer.Option(help="Class names, separated by commas.", show_default=False)],
    broker: Broker = None,
    alias: Annotated[
        list[str],
        typer.Option(metavar="NAME=CLASS", help="A class's name at some plant, e.g. Kratzer=scratches. Repeatable."),
    ] = [],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes that take part.", show_default="those of the kit's charter")
    ] = None,
    federation: Annotated[
        str | None, typer.Option(help="Name of the federation.", show_default="the kit's, or default")
    ] = None,
    quorum: Annotated[
        int, typer.Option(min=0, help="Contributions that close a round.", show_default="all that take part")
    ] = 0,
    start: Annotated[
        int, typer.Option(min=0, help="Nodes that open the first round; others may join late.", show_default="all")
    ] = 0,
    sample: Annotated[int, typer.Option(min=0, help="Nodes drawn for each round.", show_default="all")] = 0,
    deadline: Annotated[
        float, typer.Option(min=0, help="Seconds after which a quorum closes a round.", show_default="none")
    ] = 0.0,
    min_wait: Annotated[
        float, typer.Option(min=0, help="Seconds that a round stays open for nodes that are away.")
    ] = 0.0,
    rounds: Rounds = None,
    method: Method = DEFAULT_METHOD,
    option: Options = [],
    head: Head = "trained",
    model: Model = "mobilenet_v2",
    weights: Weights = "",
    size: Size = 0,
    training: Settings = [],
    seed: Seed = 0,
    threads: Threads = 1,
    evaluate_every: EvaluateEvery = 5,
    aggregate: Aggregate = None,
    liars: Liars = 0,
    chunk_size: Annotated[int, typer.Option(min=1, help="KiB in a message; a broker's lower limit is honoured.")] = 256,
    linger: Annotated[
        float,
        typer.Option(min=0, help="Seconds that the result waits at the end for absent nodes and newcomers."),
    ] = 60.0,
    state: Annotated[Path, typer.Option(help="Folder for the coordinator's state.")] = Path("coordinator-state"),
    resume: Annotated[
        bool, typer.Option("--resume/--new", help="Resume the run in --state, or begin another when it has ended.")
    ] = True,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    kit: KitFile = None,
    quiet: Quiet = False,
    as_json: Events = False,
    config: Config = None,
) -> None:
    """Coordinate a federation: publish its spec, wait for the nodes, average their contributions.

    If stopped or killed, it resumes when it is started again with the same --state.
    """
    from trainer import progress
    from trainer.federation.server.coordinator import coordinate as run
    from trainer.federation.server.ledger import Ledger
    from trainer.federation.server.spec import Participation, draft, trains
    from trainer.methods.statistics_head import list_encoders
    from trainer.statistics import encoder_choice

    endpoint, stop = make_endpoint(broker, ca, cert, key, kit), stop_on_signals()
    _check_kit(endpoint)
    disk.check_writable(state)
    if nodes is None:
        nodes = _count_nodes(endpoint, state, resume=resume)
    if weights == encoder_choice.AUTO:
        check_model_is_free(model)
        model, weights = encoder_choice.choose(state)
        print(f"--weights auto: {model} with {weights}", file=sys.stderr)
    request = make_request(
        method, option, model, weights, size, training, rounds, seed, threads, evaluate_every, aggregate, liars, head
    )
    names = [name.strip() for name in classes.split(",") if name.strip()]
    participation = Participation(quorum, start, sample, deadline, min_wait)
    federation = reconcile_with_kit(federation, endpoint, "federation") or "default"
    spec, broadcast = draft(
        request,
        federation=federation,
        classes=names,
        nodes=nodes,
        participation=participation,
        aliases=parse_pairs(alias, "--alias", "{}=scratches"),
    )
    compared = [] if trains(request) else [each for each, _ in list_encoders(model, broadcast)]
    with progress.reporter(as_json=as_json, quiet=quiet) as report, Ledger(state) as ledger:
        report_weights(request, weights, report)
        earlier = ledger.run
        outcome = run(
            ledger,
            spec,
            broadcast,
            endpoint,
            encoder_choice.write_down(report, state, {request.model: request.weights}, compared, len(names)),
            new=not resume,
            chunk_size=chunk_size * 1024,
            linger=linger,
            stop=stop,
        )
        if outcome:
            average = ledger.save_result()
            told = encoder_choice.EncoderLosses.load(state)
            costs = told.costs() if told and told.run == ledger.spec.run else {}
            report(progress.Result(result={"model": str(average)} | ({"encoders": costs} if costs else {})))
        has_begun = ledger.run is not None and (resume or ledger.run is not earlier)
    if outcome is None:
        same = "The same command" if resume else "The same command without --new"
        suspended = f"suspended; the nodes wait. {same} goes on, edge-node abort ends the run."
        print(suspended if has_begun else "ended before the run began", file=sys.stderr)
        raise typer.Exit(130)
    if not as_json:
        if told and costs:
            each = ", ".join(f"{model} {loss:.3f}" for model, loss in costs.items())
            print(f"cross-entropy of an image that is left out, at {len(told.nodes)} plants (less is better): {each}")
            dropped = ", without --option" if option else ""
            print(f"next: the same command with --new --weights auto and the --method that shall train{dropped}")
        print(f"global model: {average}")


@app.command(epilog="Example: edge-node rounds coordinator-state")
def rounds(
    state: Annotated[Path, typer.Argument(help="A coordinator's state folder.")] = Path("coordinator-state"),
    as_json: Json = False,
) -> None:
    """List the closed rounds of a coordinator's newest run: time, duration, contributors and their weights."""
    from datetime import datetime

    import msgspec

    from trainer.federation.server.journal import history

    closed_rounds = history(state)
    for each in closed_rounds:
        if as_json:
            print(msgspec.json.encode(each).decode())
            continue
        opened, closed = (datetime.fromisoformat(time) for time in (each.opened, each.closed))
        seconds, megabytes = (closed - opened).total_seconds(), each.bytes / 1e6
        weights = ", ".join(f"{node} {weight:.3f}" for node, weight in each.weights.items())
        print(
            f"round {each.round}: {opened:%Y-%m-%d %H:%M:%S} UTC, {seconds:.1f} s, {megabytes:.1f} MB, "
            f"weights: {weights}"
        )
    if not closed_rounds and not as_json:
        print("no round is closed yet", file=sys.stderr)


@app.command(epilog="Example: edge-node abort mqtt://broker.local --state coordinator-state")
def abort(
    broker: Broker = None,
    state: Annotated[Path, typer.Option(help="Folder of the coordinator's state.")] = Path("coordinator-state"),
    reason: Annotated[str, typer.Option(help="Reason, shown to the nodes' owners.")] = "its operator has ended it",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    kit: KitFile = None,
) -> None:
    """End a suspended federation early, for the coordinator and its nodes, which are left without a model."""
    from trainer.federation.server.coordinator import abort as run
    from trainer.federation.server.journal import newest_spec
    from trainer.federation.server.ledger import Ledger

    federation = newest_spec(state).federation
    with Ledger(state) as ledger:
        endpoint = make_endpoint(broker, ca, cert, key, kit)
        _check_kit(endpoint)
        run(ledger, endpoint, reason)
    print(f"federation {federation} is aborted; its nodes are told")
