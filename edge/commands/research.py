"""Federations in one process, and what a run has reached: `simulate`, `report`."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from edge.commands.options import (
    ClassesPerNode,
    Data,
    EvaluateEvery,
    Events,
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
    tell_weights,
)

app = typer.Typer()


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
    request = make_request(method, option, model, weights, size, training, rounds, seed, threads, evaluate_every)
    scheme = Scheme(partition, nodes, samples, seed, classes_per_node=classes_per_node, alpha=alpha, pool=pool)
    with progress.show(as_json=as_json, quiet=quiet) as show:
        tell_weights(request, weights, show)
        outcome = simulate_folder(request, data, scheme, out, show)
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if not as_json:
        report.table(outcome, Console())


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
