"""`edge-node`: each command parses, calls one function, prints. Imports are inside them: `--help` is fast."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from broker_config.errors import EdgeNodeError, UsageError, explain

if TYPE_CHECKING:
    from broker_config.link import Endpoint
    from trainer.federation.spec import Request
    from trainer.progress import Report

app = typer.Typer(
    name="edge-node",
    help="Plants learn together to recognise surface defects, without any image leaving the building; "
    "then each recognises them live.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Broker = Annotated[
    str,
    typer.Argument(
        metavar="BROKER_URL",
        help="mqtt://, mqtts://, ws:// or wss://, user@host:port. The password comes from EDGE_NODE_PASSWORD.",
    ),
]
Ca = Annotated[Path | None, typer.Option(help="Certificate authority of the broker (PEM), for mqtts:// and wss://.")]
Cert = Annotated[Path | None, typer.Option(help="This side's certificate (PEM).")]
Key = Annotated[Path | None, typer.Option(help="This side's private key (PEM).")]
Data = Annotated[Path, typer.Option(help="Folder of labelled images: one folder a class.", show_default=False)]
Method = Annotated[
    str,
    typer.Option(
        help="afedcl, ditto, fedala, fedavg, fedbn, fednova, fedper, fedprox, fedrep, fenda, local or scaffold."
    ),
]
Options = Annotated[
    list[str], typer.Option("--option", metavar="NAME=VALUE", help="An option of the method, e.g. lambda=0.1.")
]
Model = Annotated[str, typer.Option(help="mobilenet_v2, resnet18, resnet50 or small.")]
WEIGHTS = "Initial weights: imagenet, surface (come with edge-node), none, or a safetensors FILE of torchvision's."
_WEIGHTS = "imagenet, or surface when offline; none for small"
Weights = Annotated[str, typer.Option(help=WEIGHTS, show_default=_WEIGHTS)]
Size = Annotated[
    int, typer.Option(help="Width and height of the network's input, pixels.", show_default="128; 64 for small")
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--training",
        metavar="NAME=VALUE",
        help="learning_rate, local_epochs, batch_size, augment, batch_norm (train, eval) or moments (keep, reset).",
    ),
]
ROUNDS, CLASSES, SAMPLES = "Rounds of the federation.", "Classes of each node.", "Training images of each node."
Rounds = Annotated[int, typer.Option(min=1, help=ROUNDS)]
Seed = Annotated[int, typer.Option(min=0, help="Of everything that is random.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads of each training process.")]
EvaluateEvery = Annotated[int, typer.Option(min=1, help="Rounds between two looks at the held-out images.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes that take part.")]
Json = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output.")]
Events = Annotated[
    bool, typer.Option("--json", help="For machines: events as JSON lines on standard output, the result as the last.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")]
ClassesPerNode = Annotated[int, typer.Option(min=1, help="disjoint: classes of each node.")]
Samples = Annotated[int, typer.Option(min=2, help=SAMPLES)]


def _read_config(context: typer.Context, file: Path | None) -> None:
    if file is not None:
        from edge.config import read

        context.default_map = read(file, context)


Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with options of this command, as edge-node init writes it; the command line beats it.",
        is_eager=True,
        callback=_read_config,
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("edge-node"))
        raise typer.Exit


@app.callback()
def settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""


@app.command(epilog="Example: edge-node demo --data images/ --nodes 5 --rounds 30")
def demo(
    data: Annotated[Path | None, typer.Option(help="Folder of labelled images; without it, images are drawn.")] = None,
    nodes: Nodes = 5,
    rounds: Annotated[int | None, typer.Option(min=1, help=ROUNDS, show_default="30; 20 on drawn images")] = None,
    method: Method = "afedcl",
    option: Options = [],
    model: Model = "mobilenet_v2",
    weights: Annotated[str, typer.Option(help=WEIGHTS, show_default=f"{_WEIGHTS}; surface on drawn images")] = "",
    size: Annotated[
        int,
        typer.Option(
            help="Width and height of the network's input, pixels.",
            show_default="128; 64 for small and on drawn images",
        ),
    ] = 0,
    training: Settings = [],
    classes_per_node: Annotated[
        int | None, typer.Option(min=1, help=CLASSES, show_default="2; 4 on drawn images")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=2, help=SAMPLES, show_default="10; 8 on drawn images")] = None,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for everything that the run leaves.")] = Path("runs/demo"),
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """See it all: a broker, a coordinator and trainers learn together, then a daemon judges images."""
    import msgspec
    from rich.console import Console

    from trainer import progress, report
    from trainer.demo import run
    from trainer.weights import SURFACE

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, the child processes included
    rounds, size = rounds or (30 if data else 20), size or (0 if data else 64)
    if data is None and model in SURFACE:
        weights = weights or "surface"  # a demo without a folder needs no connection either
    request = _request(method, option, model, weights, size, training, rounds, seed, evaluate_every=2)
    with progress.show(as_json=as_json, quiet=quiet) as show:
        _tell_weights(request, weights, show)
        outcome = run(
            request,
            data,
            out,
            show,
            nodes=nodes,
            classes_per_node=classes_per_node or (2 if data else 4),
            samples=samples or (10 if data else 8),
        )
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if as_json:
        return
    report.table(outcome, Console())
    print(f"bundles: {out / 'bundles'}\nreport: {(out / 'report.html').resolve().as_uri()}")


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
    from edge.dialogue import init as run

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    commands_to_type = run(context, commands, role, answers, out, yes=yes, force=force)
    print("next: " + "\n      ".join(commands_to_type))


@app.command(epilog="Example: edge-node coordinate mqtt://broker.local --nodes 5 --classes scratches,patches,inclusion")
def coordinate(
    broker: Broker,
    classes: Annotated[str, typer.Option(help="Class names, separated by commas.", show_default=False)],
    nodes: Nodes,
    federation: Annotated[str, typer.Option(help="Name of the federation.")] = "default",
    quorum: Annotated[
        int | None, typer.Option(min=1, help="Contributions that close a round.", show_default="all nodes")
    ] = None,
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
    chunk_size: Annotated[
        int, typer.Option(min=1, help="KiB a message; a broker's own limit is honoured anyway.")
    ] = 256,
    state: Annotated[Path, typer.Option(help="Folder for the coordinator's state.")] = Path("coordinator-state"),
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    quiet: Quiet = False,
    as_json: Events = False,
    config: Config = None,
) -> None:
    """Coordinate a federation: say what is learnt, wait for the nodes, average what they contribute."""
    from safetensors.numpy import save_file

    from broker_config.disk import writing
    from trainer import progress
    from trainer.federation.coordinator import coordinate as run
    from trainer.federation.spec import draft

    request = _request(method, option, model, weights, size, training, rounds, seed, threads, evaluate_every)
    names = [name.strip() for name in classes.split(",") if name.strip()]
    spec, broadcast = draft(request, federation=federation, classes=names, nodes=nodes, quorum=quorum)
    stop = _stop_on_signals()
    average = state / "global.safetensors"
    with progress.show(as_json=as_json, quiet=quiet) as report:
        _tell_weights(request, weights, report)
        outcome = run(
            spec, broadcast, _endpoint(broker, ca, cert, key), state, report, chunk_size=chunk_size * 1024, stop=stop
        )
        if outcome:
            with writing(state):
                save_file(outcome.broadcast, average)
            report(progress.Result(result={"model": str(average)}))
    if outcome is None:
        print("stopped; the nodes have been told. Starting again begins a new run.", file=sys.stderr)
        raise typer.Exit(130)
    if not as_json:
        print(f"global model: {average}")


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

    from trainer.intake import show
    from trainer.intake.check import check as run

    stderr = Console(stderr=True)
    intake = run(
        folder,
        test,
        size,
        lambda entries: track(entries, "looking", console=stderr, transient=True, disable=not stderr.is_terminal),
    )
    picture = picture or (None if as_json else Path("edge-node-check.png"))
    if picture and intake.looks:
        show.draw(intake, picture)
    else:
        picture = None
    if as_json:
        print(msgspec.json.encode(show.summarise(intake, picture)).decode())
    else:
        show.table(intake, Console())
        if picture:
            print(f"picture: {picture}")
    raise typer.Exit(0 if intake.can_join else 1)


@app.command(epilog="Example: edge-node join mqtt://broker.local --data images/ --name plant-a")
def join(
    broker: Broker,
    data: Data,
    name: Annotated[str, typer.Option(help="This node's name.", show_default=False)],
    test: Annotated[Path | None, typer.Option(help="Folder of held-out images; by default a share of --data.")] = None,
    federation: Annotated[str | None, typer.Option(help="Its name, if the broker has several.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder for this node's state.", show_default="edge-node-NAME")
    ] = None,
    telemetry: Annotated[
        bool, typer.Option("--telemetry", help="Tell the coordinator losses, A_k and accuracy.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a coordinator.")] = 600,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    quiet: Quiet = False,
    as_json: Events = False,
    config: Config = None,
) -> None:
    """Take part in a federation with this plant's images. The images stay here."""
    from trainer import progress
    from trainer.enrol import join as run

    stop = _stop_on_signals()
    with progress.show(as_json=as_json, quiet=quiet) as report:
        model = run(
            _endpoint(broker, ca, cert, key),
            name=name,
            folder=data,
            test=test,
            state=state or Path(f"edge-node-{name}"),
            federation=federation,
            telemetry=telemetry,
            wait=wait,
            report=report,
            stop=stop,
        )
        if model:
            report(progress.Result(result={"model": str(model)}))
    if model is None:
        raise typer.Exit(130)
    if not as_json:
        print(f"personal model: {model}\nnext: edge-node export {model} --out bundles")


@app.command(epilog="Example: edge-node rounds coordinator-state")
def rounds(
    state: Annotated[Path, typer.Argument(help="A coordinator's state folder.", show_default=False)],
    as_json: Json = False,
) -> None:
    """List the closed rounds of a coordinator's newest run: who contributed, with which weight."""
    import msgspec

    from trainer.federation.journal import history

    for line in history(state):
        if as_json:
            print(msgspec.json.encode(line).decode())
        else:
            told = ", ".join(f"{node} {weight:.3f}" for node, weight in line.weights.items())
            print(f"round {line.round}: {line.bytes / 1e6:.1f} MB, weights: {told}")


@app.command(epilog="Example: edge-node simulate --method fedavg --data images/ --rounds 20 --seed 1 --json")
def simulate(
    data: Data,
    method: Method = "afedcl",
    partition: Annotated[str, typer.Option(help="disjoint, dirichlet or iid.")] = "disjoint",
    classes_per_node: ClassesPerNode = 2,
    alpha: Annotated[float, typer.Option(help="dirichlet: concentration; smaller is more different.")] = 0.1,
    nodes: Nodes = 5,
    samples: Samples = 10,
    rounds: Rounds = 30,
    option: Options = [],
    model: Model = "mobilenet_v2",
    weights: Weights = "",
    size: Size = 0,
    training: Settings = [],
    seed: Seed = 0,
    threads: Threads = 1,
    evaluate_every: EvaluateEvery = 5,
    pool: Annotated[str, typer.Option(help="report; tuning: images that no report uses; or all.")] = "report",
    out: Annotated[Path | None, typer.Option(help="Folder for the personal models and report.json.")] = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """Run a federation in one process, without a broker: the same methods, the same numbers."""
    import msgspec
    from rich.console import Console

    from trainer import progress, report
    from trainer.partition import Scheme
    from trainer.simulate import simulate_folder

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    request = _request(method, option, model, weights, size, training, rounds, seed, threads, evaluate_every)
    scheme = Scheme(partition, nodes, samples, seed, classes_per_node=classes_per_node, alpha=alpha, pool=pool)
    with progress.show(as_json=as_json, quiet=quiet) as show:
        _tell_weights(request, weights, show)
        outcome = simulate_folder(request, data, scheme, out, show)
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if not as_json:
        report.table(outcome, Console())


@app.command(epilog="Example: edge-node surfaces images --plants 5 --per-class 40")
def surfaces(
    out: Annotated[Path, typer.Argument(help="Folder for the images: OUT/plant-1/CLASS/...", show_default=False)],
    plants: Annotated[int, typer.Option(min=1, help="Plants: each has its own sheet, light, camera and process.")] = 5,
    per_class: Annotated[int, typer.Option(min=1, help="Images of each class at each plant.")] = 40,
    size: Annotated[int, typer.Option(min=16, max=1024, help="Width and height, pixels.")] = 128,
    seed: Seed = 0,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """Draw images of metal surfaces, with defects and without, for trials before a plant's own images are labelled."""
    from trainer import progress
    from trainer.surfaces import write_plants

    with progress.show(as_json=as_json, quiet=quiet) as show:
        count = write_plants(out, plants, per_class, size, seed, show)
        show(progress.Result(result={"folder": str(out), "images": count}))
    if not as_json:
        print(f"{count} images: {out}   some of them: {out / 'contact-sheet.png'}")
        print(f"next: edge-node join BROKER_URL --data {out / 'plant-1'} --name plant-1")


@app.command(epilog="Example: edge-node report edge-node-plant-a")
def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="What a run left: the --out folder of demo or simulate, or the state folder of join or coordinate.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="File for the page.", show_default="RUN/report.html")] = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """Write one self-contained web page about a run: what was reached, and on which images, shown."""
    from trainer import progress
    from trainer.page.compose import write

    with progress.show(as_json=as_json, quiet=quiet) as show:
        page = write(run, out or run / "report.html", show)
        show(progress.Result(result={"report": str(page)}))
    if not as_json:
        print(f"report: {page.resolve().as_uri()}")


@app.command(epilog="Example: edge-node export edge-node-plant-a/model --out bundles")
def export(
    models: Annotated[
        list[Path], typer.Argument(help="Personal models that join or simulate left.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the bundles, one a node.")] = Path("bundles"),
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """Turn personal models into bundles for the line: ONNX, checked against torch."""
    from export.onnx import export as run
    from trainer import progress

    _end_on_signals()
    with progress.show(as_json=as_json, quiet=quiet) as report:
        written = run(models, out, report)
        report(progress.Result(result={"bundles": [str(each.folder) for each in written]}))
    if not as_json:
        print(f"bundles: {', '.join(str(each.folder) for each in written)}")
        print(f"next: edge-node serve {written[0].folder}")


@app.command(epilog="Example: edge-node serve bundles/plant-a --watch camera/ --output verdicts.jsonl")
def serve(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080,
    watch: Annotated[Path | None, typer.Option(help="Folder in which new images appear.")] = None,
    output: Annotated[Path | None, typer.Option(help="File for verdicts, a JSON line each.")] = None,
    mqtt: Annotated[str | None, typer.Option(metavar="BROKER_URL", help="Broker for verdicts.")] = None,
    line: Annotated[str, typer.Option(help="Name of the line, in its MQTT topic.")] = "line-1",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads.", show_default="2, or the cores there are")] = 0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    config: Config = None,
) -> None:
    """Judge images as they come: over HTTP and from a watched folder."""
    from edge.daemon import serve as run

    endpoint = _endpoint(mqtt, ca, cert, key) if mqtt else None
    raise typer.Exit(
        run(bundle, host=host, port=port, watch=watch, output=output, mqtt=endpoint, line=line, threads=threads)
    )


@app.command(epilog="Example: edge-node infer bundles/plant-a image.jpg")
def infer(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.", show_default=False)],
    images: Annotated[list[Path], typer.Argument(help="Image files.", show_default=False)],
    threads: Annotated[int, typer.Option(min=0, help="CPU threads.", show_default="2, or the cores there are")] = 0,
    as_json: Json = False,
) -> None:
    """Judge image files, once. Exit code 2 if one of them cannot be read."""
    import msgspec

    from edge.line import Failure, judge_files

    failed = False
    for outcome in judge_files(bundle, images, threads):
        failed |= isinstance(outcome, Failure)
        if as_json:
            print(msgspec.json.encode(outcome).decode())
        elif isinstance(outcome, Failure):
            print(f"{outcome.error}\n  What to do: {outcome.remedy}", file=sys.stderr)
        else:
            print(f"{outcome.image}: {outcome.label} ({outcome.confidence:.1%})")
    raise typer.Exit(UsageError.exit_code if failed else 0)


@app.command(epilog="Example: edge-node broker --port 1883")
def broker(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 1883,
    host: Annotated[str, typer.Option(help="Address to listen on. Anybody who reaches it may connect.")] = "127.0.0.1",
    kind: Annotated[Literal["auto", "mosquitto", "amqtt"], typer.Option(help="Which broker.")] = "auto",
    folder: Annotated[Path, typer.Option(help="Folder for its configuration and log.")] = Path("broker-state"),
) -> None:
    """Start a broker: mosquitto if it is installed, else the embedded one. For trials; it knows no passwords."""
    import time

    from broker_config.embedded import address_for_others, start_broker

    stop = _stop_on_signals()
    with start_broker(folder, port=port, host=host, kind=kind) as running:
        print(f"{running.kind} is listening on {running.url}; Ctrl-C ends it", flush=True)
        if others := address_for_others(host):
            print(f"other machines reach it at mqtt://{others}:{running.port}", flush=True)
        while not stop():
            if running.process.poll() is not None:
                raise EdgeNodeError("the broker has ended", f"see its log in {folder}")
            time.sleep(0.2)


def _request(
    method: str,
    option: list[str],
    model: str,
    weights: str,
    size: int,
    training: list[str],
    rounds: int,
    seed: int,
    threads: int = 1,
    evaluate_every: int = 5,
) -> "Request":
    from trainer.federation.spec import Request, check_training
    from trainer.weights import suited_weights

    request = Request(
        method=method,
        options=_pairs(option, "--option"),
        model=model,
        weights=weights or suited_weights(model),
        size=size,
        training=_pairs(training, "--training"),
        rounds=rounds,
        seed=seed,
        threads=threads,
        evaluate_every=evaluate_every,
    )
    check_training(request)
    return request


def _tell_weights(request: "Request", given: str, show: "Report") -> None:
    """Say which initial weights were chosen, where the choice depends on the connection."""
    from trainer.progress import Note

    if not given and request.weights == "surface":
        show(Note(text="ImageNet's weights are out of reach: starting from those that come with edge-node (surface)"))


def _pairs(given: list[str], flag: str) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise UsageError(f"{flag} {pair!r} is not NAME=VALUE", f"write for example {flag} {pair}=1")
    return dict(pair.split("=", 1) for pair in given)


def _endpoint(url: str, ca: Path | None, cert: Path | None, key: Path | None) -> "Endpoint":
    from broker_config.link import Endpoint

    return Endpoint.parse(url, ca=ca, cert=cert, key=key)


def _stop_on_signals() -> Callable[[], bool]:
    """From now on SIGINT and SIGTERM ask the running command to end by itself; a second one ends it at once."""
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        if asked:
            _end_now()
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return lambda: bool(asked)


def _end_on_signals() -> None:
    """From now on SIGINT and SIGTERM end the command at once: torch's exporter would answer Ctrl-C with a report."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _end_now())


def _end_now() -> None:
    """End without unwinding, but give the terminal back the cursor that a live view has hidden."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")
    os._exit(130)


def main() -> None:
    """Run the command line; errors are shown without a traceback, unless --debug asks for it."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EdgeNodeError.exit_code)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        explained = explain(error)
        print(f"edge-node: {explained}", file=sys.stderr)
        sys.exit(explained.exit_code)


if __name__ == "__main__":
    main()
