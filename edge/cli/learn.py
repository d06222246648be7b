"""Learning together: `init`, `coordinate`, `check`, `join`, `rounds`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import COORDINATOR, MONITOR
from edge.cli.options import (
    Aggregate,
    Broker,
    Ca,
    Cert,
    Config,
    Data,
    EvaluateEvery,
    Events,
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
    agreed,
    make_endpoint,
    make_request,
    pairs,
    stop_on_signals,
    tell_weights,
)

if TYPE_CHECKING:
    from broker_config.mqtt.endpoint import Endpoint

app = typer.Typer()


@app.command(epilog="Example: edge-node init node --set broker=mqtt://broker.local --set name=plant-a --yes")
def init(
    context: typer.Context,
    role: Annotated[
        Literal["coordinator", "node", "line"] | None,
        typer.Argument(help="What this machine is; without it, you are asked.", show_default=False),
    ] = None,
    answers: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="An answer beforehand, or any other option of the role."),
    ] = [],
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="ROLE.toml")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take what is proposed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration file for a coordinator, a node or a line, after a few questions."""
    from edge.cli.init_dialogue import init as run

    commands = context.find_root().command.commands  # type: ignore[attr-defined]
    commands_to_type = run(context, commands, role, answers, out, yes=yes, force=force)
    print("next: " + "\n      ".join(commands_to_type))


def _check_coordinates(endpoint: "Endpoint") -> None:
    """Raise UsageError if the kit is another member's."""
    if endpoint.kit and endpoint.kit.name != COORDINATOR:
        raise UsageError(f"this kit is that of {endpoint.kit.name}", f"take that of the {COORDINATOR}")


def _places(endpoint: "Endpoint", state: Path, *, resume: bool) -> int:
    """How many nodes take part if nobody says so: as many as before, or all that are in the charter."""
    from trainer.federation.server.journal import has_run, newest_spec

    if endpoint.seal is None:
        raise UsageError("the number of nodes is missing", "say with --nodes how many take part")
    if resume and has_run(state):
        return newest_spec(state).nodes
    return len(endpoint.seal.charter.nodes)


@app.command(epilog="Example: edge-node coordinate mqtt://broker.local --nodes 5 --classes scratches,patches,inclusion")
def coordinate(
    classes: Annotated[str, typer.Option(help="Class names, separated by commas.", show_default=False)],
    broker: Broker = None,
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
    rounds: Rounds = 30,
    method: Method = "afedcl",
    option: Options = [],
    model: Model = "mobilenet_v2",
    weights: Weights = "",
    size: Size = 0,
    training: Settings = [],
    seed: Seed = 0,
    threads: Threads = 1,
    evaluate_every: EvaluateEvery = 5,
    aggregate: Aggregate = "mean",
    liars: Liars = 0,
    chunk_size: Annotated[
        int, typer.Option(min=1, help="KiB a message; a broker's own limit is honoured anyway.")
    ] = 256,
    linger: Annotated[
        float, typer.Option(min=0, help="Seconds that the result waits for nodes that are away at the end.")
    ] = 60.0,
    state: Annotated[Path, typer.Option(help="Folder for the coordinator's state.")] = Path("coordinator-state"),
    resume: Annotated[
        bool, typer.Option("--resume/--new", help="Go on with the run in --state, or begin another when it has ended.")
    ] = True,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    kit: KitFile = None,
    quiet: Quiet = False,
    as_json: Events = False,
    config: Config = None,
) -> None:
    """Coordinate a federation: say what is learnt, wait for the nodes, average what they contribute.

    Stopped or killed, it goes on where it was when it is started again with the same --state.
    """
    from trainer import progress
    from trainer.federation.server.coordinator import coordinate as run
    from trainer.federation.server.ledger import Ledger
    from trainer.federation.server.spec import Terms, draft

    endpoint, stop = make_endpoint(broker, ca, cert, key, kit), stop_on_signals()
    _check_coordinates(endpoint)
    if nodes is None:
        nodes = _places(endpoint, state, resume=resume)
    request = make_request(
        method, option, model, weights, size, training, rounds, seed, threads, evaluate_every, aggregate, liars
    )
    names = [name.strip() for name in classes.split(",") if name.strip()]
    terms = Terms(quorum, start, sample, deadline, min_wait)
    federation = agreed(federation, endpoint, "federation") or "default"
    spec, broadcast = draft(request, federation=federation, classes=names, nodes=nodes, terms=terms)
    with progress.reporter(as_json=as_json, quiet=quiet) as report, Ledger(state) as ledger:
        tell_weights(request, weights, report)
        outcome = run(
            ledger,
            spec,
            broadcast,
            endpoint,
            report,
            new=not resume,
            chunk_size=chunk_size * 1024,
            linger=linger,
            stop=stop,
        )
        if outcome:
            average = ledger.save_result()
            report(progress.Result(result={"model": str(average)}))
    if outcome is None:
        same = "The same command" if resume else "The same command without --new"
        print(f"suspended; the nodes wait. {same} goes on, edge-node abort ends the run.", file=sys.stderr)
        raise typer.Exit(130)
    if not as_json:
        print(f"global model: {average}")


@app.command(epilog="Example: edge-node abort mqtt://broker.local --state coordinator-state")
def abort(
    broker: Broker = None,
    state: Annotated[Path, typer.Option(help="Folder of the coordinator's state.")] = Path("coordinator-state"),
    reason: Annotated[str, typer.Option(help="Shown to the nodes' owners.")] = "its operator has ended it",
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
        _check_coordinates(endpoint)
        run(ledger, endpoint, reason)
    print(f"federation {federation} is aborted; its nodes are told")


@app.command(epilog="Example: edge-node check images/ --test held-out/")
def check(
    folder: Annotated[Path, typer.Argument(help="Folder of labelled images: one folder a class.", show_default=False)],
    test: Annotated[Path | None, typer.Option(help="Folder of held-out images, likewise.")] = None,
    size: Annotated[int, typer.Option(min=1, help="Width and height of the network's input, pixels.")] = 128,
    picture: Annotated[
        Path | None,
        typer.Option(help="File for a contact sheet.", show_default="edge-node-check.png; none with --json"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at a plant's images before it joins. Exit code 1 if it cannot join with them."""
    import msgspec
    from rich.console import Console
    from rich.progress import track

    from trainer.data.checks import findings_output
    from trainer.data.checks.image_checks import check_folders

    stderr = Console(stderr=True)
    report = check_folders(
        folder,
        test,
        size,
        lambda entries: track(entries, "looking", console=stderr, transient=True, disable=not stderr.is_terminal),
    )
    picture = picture or (None if as_json else Path("edge-node-check.png"))
    if picture and report.facts:
        findings_output.draw(report, picture)
    else:
        picture = None
    if as_json:
        print(msgspec.json.encode(findings_output.summarise(report, picture)).decode())
    else:
        findings_output.table(report, Console())
        if picture:
            print(f"picture: {picture}")
    raise typer.Exit(0 if report.can_join else 1)


@app.command(epilog="Example: edge-node join mqtt://broker.local --data images/ --name plant-a")
def join(
    data: Data,
    broker: Broker = None,
    name: Annotated[str | None, typer.Option(help="This node's name.", show_default="the kit's")] = None,
    test: Annotated[Path | None, typer.Option(help="Folder of held-out images; by default a share of --data.")] = None,
    federation: Annotated[str | None, typer.Option(help="Its name, if the broker has several.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder for this node's state.", show_default="edge-node-NAME")
    ] = None,
    telemetry: Annotated[
        bool, typer.Option("--telemetry", help="Tell the coordinator losses, A_k and accuracy.")
    ] = False,
    demand: Annotated[
        list[str],
        typer.Option(
            "--demand",
            metavar="NAME=VALUE",
            help="Take part only if this or more hides images in patches that others see: noise=1, mix=4, levels=8.",
        ),
    ] = [],
    wait: Annotated[float, typer.Option(help="Seconds to wait for a coordinator.")] = 600,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    kit: KitFile = None,
    quiet: Quiet = False,
    as_json: Events = False,
    config: Config = None,
) -> None:
    """Take part in a federation with this plant's images. The images stay here."""
    from trainer import progress
    from trainer.federation.client.discovery import join as run

    endpoint = make_endpoint(broker, ca, cert, key, kit)
    if endpoint.kit and endpoint.kit.name in (COORDINATOR, MONITOR):
        raise UsageError(f"this kit is that of {endpoint.kit.name}", "take a node's")
    name = agreed(name, endpoint, "name")
    if name is None:
        raise UsageError("this node's name is missing", "choose one with --name, or pass a kit: --kit FILE")
    stop = stop_on_signals()
    with progress.reporter(as_json=as_json, quiet=quiet) as report:
        model = run(
            endpoint,
            name=name,
            folder=data,
            test=test,
            state=state or Path(f"edge-node-{name}"),
            federation=agreed(federation, endpoint, "federation"),
            telemetry=telemetry,
            demands=pairs(demand, "--demand", "{}=4"),
            wait=wait,
            report=report,
            stop=stop,
        )
        if model:
            report(progress.Result(result={"model": str(model)}))
    if model is None:
        print("stopped; the same command goes on", file=sys.stderr)
        raise typer.Exit(130)
    if not as_json:
        signed = f" --kit {kit}" if kit else ""
        print(f"personal model: {model}\nnext: edge-node export {model} --out bundles{signed}")


@app.command(epilog="Example: edge-node rounds coordinator-state")
def rounds(
    state: Annotated[Path, typer.Argument(help="A coordinator's state folder.")] = Path("coordinator-state"),
    as_json: Json = False,
) -> None:
    """List the closed rounds of a coordinator's newest run: when, how long, who contributed with which weight."""
    from datetime import datetime

    import msgspec

    from trainer.federation.server.journal import history

    lines = history(state)
    for line in lines:
        if as_json:
            print(msgspec.json.encode(line).decode())
            continue
        opened, closed = (datetime.fromisoformat(time) for time in (line.opened, line.closed))
        seconds, megabytes = (closed - opened).total_seconds(), line.bytes / 1e6
        told = ", ".join(f"{node} {weight:.3f}" for node, weight in line.weights.items())
        print(
            f"round {line.round}: {opened:%Y-%m-%d %H:%M:%S} UTC, {seconds:.1f} s, {megabytes:.1f} MB, weights: {told}"
        )
    if not lines and not as_json:
        print("no round is closed yet", file=sys.stderr)
