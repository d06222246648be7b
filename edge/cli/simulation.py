"""Federations in one process, public data sets, pages about runs: `simulate`, `dataset`, `report`."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from broker_config.protocol.errors import UsageError
from edge.cli.options import (
    Aggregate,
    ClassesPerNode,
    Device,
    EvaluateEvery,
    Events,
    Json,
    Kind,
    Liars,
    Method,
    Model,
    Nodes,
    Options,
    Quiet,
    Rounds,
    Samples,
    Seed,
    Settings,
    Size,
    Threads,
    Weights,
    make_request,
    pairs,
    tell_weights,
)

app = typer.Typer()


@app.command(epilog="Example: edge-node simulate --method fedavg --data images/ --rounds 20 --seed 1 --json")
def simulate(
    data: Annotated[
        list[Path],
        typer.Option(
            help="Folder of labelled images: one folder a class. Several --data are sources.", show_default=False
        ),
    ],
    method: Method = "afedcl",
    partition: Annotated[
        str,
        typer.Option(
            help="disjoint, dirichlet, iid; groups: of nodes, each with --classes-per-node that no other has; "
            "sources: each node's images are of one source; or sources_groups: groups within each source."
        ),
    ] = "disjoint",
    rename: Annotated[
        list[str], typer.Option(metavar="CLASS=COMMON", help="A class of one source that another source has too.")
    ] = [],
    classes_per_node: ClassesPerNode = 2,
    alpha: Annotated[float, typer.Option(help="dirichlet: concentration; smaller is more different.")] = 0.1,
    nodes: Nodes = 5,
    samples: Samples = 10,
    test_samples: Annotated[
        int, typer.Option(min=1, help="Held-out images of each node at most, but one of each of its classes.")
    ] = 60,
    shared: Annotated[
        int, typer.Option(min=0, help="Images of each class that all nodes train on, the same ones, beside their own.")
    ] = 0,
    rounds: Rounds = 30,
    option: Options = [],
    model: Model = "mobilenet_v2",
    weights: Weights = "",
    size: Size = 0,
    training: Settings = [],
    seed: Seed = 0,
    threads: Threads = 1,
    engine: Kind = "plain",
    device: Device = "cpu",
    evaluate_every: EvaluateEvery = 5,
    aggregate: Aggregate = "mean",
    liars: Liars = 0,
    pool: Annotated[str, typer.Option(help="report; tuning: images that no report uses; or all.")] = "report",
    out: Annotated[Path | None, typer.Option(help="Folder for the personal models and report.json.")] = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """Run a federation in one process, without a broker: the same methods, the same numbers."""
    import msgspec
    from rich.console import Console

    from trainer import progress
    from trainer.data.partition import Scheme
    from trainer.report import summary as report
    from trainer.training.simulation import Engine, simulate_folder

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    request = make_request(
        method, option, model, weights, size, training, rounds, seed, threads, evaluate_every, aggregate, liars
    )
    scheme = Scheme(partition, nodes, samples, seed, classes_per_node, alpha, pool, test_samples, shared)
    with progress.reporter(as_json=as_json, quiet=quiet) as show:
        tell_weights(request, weights, show)
        outcome = simulate_folder(request, data, pairs(rename, "--rename"), scheme, out, show, Engine(engine, device))
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if not as_json:
        report.print_table(outcome, Console())


@app.command(epilog="Example: edge-node dataset neu-cls --out images")
def dataset(
    name: Annotated[str, typer.Argument(help="Which; without it, all are listed.", show_default=False)] = "",
    out: Annotated[Path | None, typer.Option(help="Download it, and lay it out as class folders here.")] = None,
    origin: Annotated[
        str, typer.Option("--from", metavar="FILE", help="A ZIP file, folder or URL with it, instead of its own URL.")
    ] = "",
    verify: Annotated[Path | None, typer.Option(help="Class folders: are they this data set?")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Public data sets of surface defects: list them, get one, or verify a copy (exit code 1 if it is another)."""
    import msgspec
    from rich.console import Console

    from trainer.data.dataset_download import bar, obtain
    from trainer.data.public_datasets import DATASETS, compare, describe, known

    if (out and verify) or (origin and not out):
        raise UsageError("--out gets a data set, --verify looks at a copy", "pass one of them; --from goes with --out")
    if not (out or verify):
        chosen = [known(name)] if name else list(DATASETS.values())
        listing = msgspec.json.encode(chosen).decode() if as_json else "\n\n".join(map(describe, chosen))
        print(listing)
        return
    wanted = known(name)
    if verify:
        outcome = compare(wanted, verify)
    elif out:
        console = Console(stderr=True, quiet=quiet or as_json, soft_wrap=True, highlight=False)
        console.print(describe(wanted), markup=False)
        with bar(console) as watch:
            outcome = obtain(wanted, origin, out, watch)
    print(msgspec.json.encode(outcome.facts).decode() if as_json else outcome.verdict)
    raise typer.Exit(1 if verify and outcome.differences else 0)


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
    from trainer.report.report_page import write

    with progress.reporter(as_json=as_json, quiet=quiet) as show:
        page = write(run, out or run / "report.html", show)
        show(progress.Result(result={"report": str(page)}))
    if not as_json:
        print(f"report: {page.resolve().as_uri()}")
