"""Commands for trials, before a plant has labelled images: `demo`, `surfaces`,
`dataset`, `simulate`.
"""

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError
from edge_node.cli.help_panels import Panel
from edge_node.cli.option_structs import take_options
from edge_node.cli.shared_options import (
    DEFAULT_METHOD,
    DEFAULT_PARTITION,
    METHOD_NAMES,
    MODEL_NAMES,
    ROUNDS,
    SIZE,
    SUITED_WEIGHTS,
    WEIGHTS,
    Group,
    Json,
    ModelOptions,
    OutputOptions,
    Partition,
    Quiet,
    RequestOptions,
    Seed,
    TrackedOutputOptions,
    check_model_is_free,
    parse_pairs,
    report_weights,
)

app = typer.Typer()


_ROUNDS = 4  # of the demo on drawn images, on which more rounds add nothing
_SAMPLES = "Training images of each node."
Nodes = Annotated[int, typer.Option(min=1, help="Nodes that take part.")]


class DemoOptions(Struct, frozen=True, kw_only=True):
    """The images, how nodes share them, and where everything goes."""

    data: Annotated[
        Path | None, typer.Option(help="Folder of labelled images; without it, images are drawn.")
    ] = None
    nodes: Nodes = 5
    classes_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Classes of each node.", show_default="2; 4 on drawn images"),
    ] = None
    samples: Annotated[
        int | None, typer.Option(min=2, help=_SAMPLES, show_default="10; 8 on drawn images")
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for everything that the run leaves.")] = Path(
        "runs/demo"
    )


class DemoModelOptions(ModelOptions, frozen=True, kw_only=True):
    """What the demo trains: by default what suits the images that it draws."""

    rounds: Annotated[
        int | None,
        typer.Option(min=1, help=ROUNDS, show_default=f"the method's; {_ROUNDS} on drawn images"),
    ] = None
    method: Annotated[str | None, typer.Option(help=METHOD_NAMES, show_default=DEFAULT_METHOD)] = (
        None
    )
    model: Annotated[
        str,
        typer.Option(
            help=MODEL_NAMES, show_default="as for simulate; mobilenet_v2 on drawn images"
        ),
    ] = ""
    weights: Annotated[
        str, typer.Option(help=WEIGHTS, show_default=f"{SUITED_WEIGHTS}; surface on drawn images")
    ] = ""
    size: Annotated[
        int,
        typer.Option(help=SIZE, show_default="as for simulate; 64 on drawn images"),
        Panel.TRAINING,
    ] = 0


@app.command(epilog="Example: edge-node demo --data images/ --nodes 5 --rounds 30")
@take_options
def demo(output: OutputOptions, options: DemoOptions, wanted: DemoModelOptions) -> None:
    """See it all: a broker, a coordinator and trainers learn together,
    then a daemon inspects images.
    """
    import msgspec
    from rich.console import Console

    from trainer import progress
    from trainer.demo.demo_screen import print_outcome
    from trainer.demo.federation_demo import run
    from trainer.methods.base import MODEL
    from trainer.models.catalogue import SHIPPED
    from trainer.statistics.encoder_choice import AUTO

    # ends like Ctrl-C, the child processes included
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if wanted.weights == AUTO:
        raise UsageError(
            "demo does not take --weights auto",
            "let edge-node simulate --weights auto choose, and name that",
        )
    data = options.data
    out = options.out
    if data is None:
        if not (wanted.method or wanted.rounds):
            wanted = replace(wanted, rounds=_ROUNDS)
        if wanted.chosen_model() == MODEL:
            wanted = replace(wanted, model=wanted.model or "mobilenet_v2")
        wanted = replace(wanted, size=wanted.size or 64)
        # then a demo without a folder needs no connection
        if shipped := SHIPPED.get(wanted.chosen_model()):
            wanted = replace(wanted, weights=wanted.weights or shipped.weights)
    wanted = replace(wanted, method=wanted.method or DEFAULT_METHOD)
    request = wanted.request()
    with output.reporter() as show:
        report_weights(request, wanted.weights, show)
        products = 2 if data else 4
        rounds = 10 if data else 8
        outcome = run(
            request,
            data,
            out,
            show,
            nodes=options.nodes,
            classes_per_node=options.classes_per_node or products,
            samples=options.samples or rounds,
        )
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if output.as_json:
        return
    print_outcome(outcome, Console())
    print(f"bundles: {out / 'bundles'}\nreport: {(out / 'report.html').resolve().as_uri()}")


@app.command(epilog="Example: edge-node surfaces images --plants 5 --per-class 40")
@take_options
def surfaces(
    out: Annotated[
        Path,
        typer.Argument(help="Folder for the images: OUT/plant-1/CLASS/...", show_default=False),
    ],
    output: OutputOptions,
    plants: Annotated[
        int, typer.Option(min=1, help="Plants: each has its own sheet, light, camera and process.")
    ] = 5,
    per_class: Annotated[int, typer.Option(min=1, help="Images of each class at each plant.")] = 40,
    size: Annotated[int, typer.Option(min=16, max=1024, help="Width and height, pixels.")] = 128,
    seed: Seed = 0,
) -> None:
    """Draw images of metal surfaces, with defects and without,
    for trials before a plant's own images are labelled.
    """
    from trainer import progress
    from trainer.data.drawn_surfaces import write_plants

    with output.reporter() as show:
        count = write_plants(out, plants, per_class, size, seed, show)
        show(progress.Result(result={"folder": str(out), "images": count}))
    if not output.as_json:
        print(f"{count} images: {out}   some of them: {out / 'contact-sheet.png'}")
        classes = ",".join(sorted(each.name for each in (out / "plant-1").iterdir()))
        print(f"next: edge-node coordinate BROKER_URL --nodes {plants} --classes {classes}")
        print(
            f"and for each plant: edge-node join BROKER_URL --data {out / 'plant-1'} --name plant-1"
        )


@app.command(epilog="Example: edge-node dataset neu-cls --out images")
def dataset(
    name: Annotated[
        str, typer.Argument(help="Data set; without it, all are listed.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder to download it to, laid out as class folders.")
    ] = None,
    origin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A ZIP file, folder or URL with it, instead of its own URL.",
        ),
    ] = "",
    verify: Annotated[
        Path | None, typer.Option(help="Class folders to verify as a copy of this data set.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Public data sets of surface defects: list them, get one, or verify a copy
    (exit code 1 if it is another).
    """
    import msgspec
    from rich.console import Console

    from trainer.data.dataset_download import fetch_dataset, show_progress
    from trainer.data.datasets import DATASETS
    from trainer.data.public_datasets import compare_folder, find_dataset, format_description

    if (out and verify) or (origin and not out):
        raise UsageError(
            "--out gets a data set, --verify checks a copy",
            "pass one of them; --from goes with --out",
        )
    if not (out or verify):
        chosen = [find_dataset(name)] if name else list(DATASETS.values())
        listing = (
            msgspec.json.encode(chosen).decode()
            if as_json
            else "\n\n".join(map(format_description, chosen))
        )
        print(listing)
        return
    wanted = find_dataset(name)
    if verify:
        outcome = compare_folder(wanted, verify)
    elif out:
        console = Console(stderr=True, quiet=quiet or as_json, soft_wrap=True, highlight=False)
        console.print(format_description(wanted), markup=False)
        with show_progress(console) as watch:
            outcome = fetch_dataset(wanted, origin, out, watch)
    text = msgspec.json.encode(outcome.facts).decode() if as_json else outcome.verdict
    print(text)
    code = 1 if verify and outcome.differences else 0
    raise typer.Exit(code)


class SimulateOptions(Struct, frozen=True, kw_only=True):
    """The images, how nodes share them, and how the nodes are computed."""

    data: Annotated[
        list[Path],
        typer.Option(
            help="Folder of labelled images: one folder a class. Several --data are sources.",
            show_default=False,
        ),
    ]
    nodes: Nodes = 5
    samples: Annotated[int, typer.Option(min=2, help=_SAMPLES)] = 10
    partition: Partition = DEFAULT_PARTITION
    alias: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=CLASS",
            help="A source's own name of a class that others call CLASS. Repeatable.",
        ),
        Panel.IMAGES,
    ] = []
    group: Group = None
    classes_per_node: Annotated[
        int,
        typer.Option(min=1, help="Classes of each node, where a partition has this option."),
        Panel.IMAGES,
    ] = 2
    alpha: Annotated[
        float,
        typer.Option(
            help="Concentration, where a partition has this option; smaller is more different."
        ),
        Panel.IMAGES,
    ] = 0.1
    test_samples: Annotated[
        int,
        typer.Option(
            min=1, help="Held-out images of each node at most, but one of each of its classes."
        ),
        Panel.IMAGES,
    ] = 60
    shared: Annotated[
        int,
        typer.Option(
            min=0,
            help="Images of each class that all nodes train on, the same ones, beside their own.",
        ),
        Panel.IMAGES,
    ] = 0
    pool: Annotated[
        str,
        typer.Option(help="report; tuning: images that no report uses; or all."),
        Panel.IMAGES,
    ] = "report"
    engine: Annotated[
        Literal["plain", "batched"],
        typer.Option(
            help=(
                "plain: node after node, repeatable bit for bit; batched: many nodes at once, "
                "for GPUs."
            )
        ),
        Panel.TRAINING,
    ] = "plain"
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where the nodes train."), Panel.TRAINING
    ] = "cpu"
    out: Annotated[
        Path | None, typer.Option(help="Folder for the personal models and report.json.")
    ] = None


@app.command(epilog="Example: edge-node simulate --data images/ --rounds 20 --seed 1 --json")
@take_options
def simulate(
    output: TrackedOutputOptions, options: SimulateOptions, wanted: RequestOptions
) -> None:
    """Run a federation in one process, without a broker: the same methods, the same numbers."""
    import msgspec
    from rich.console import Console

    from trainer import progress
    from trainer.data.partition import Scheme
    from trainer.federation import run_summary as report
    from trainer.federation.simulation import Engine, simulate_folder
    from trainer.statistics.encoder_choice import AUTO

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    request = wanted.request()
    scheme = Scheme(
        options.partition,
        options.nodes,
        options.samples,
        wanted.seed,
        {"classes_per_node": options.classes_per_node, "alpha": options.alpha},
        options.pool,
        options.test_samples,
        options.shared,
    )
    if wanted.weights == AUTO:
        check_model_is_free(wanted)
    with output.reporter() as show:
        report_weights(request, wanted.weights, show)
        outcome = simulate_folder(
            request,
            options.data,
            parse_pairs(options.alias, "--alias", "{}=scratches"),
            scheme,
            options.out,
            show,
            Engine(options.engine, options.device),
            options.group,
        )
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if not output.as_json:
        report.print_table(outcome, Console())
