"""Commands of vertical federated learning: `vfl coordinate`, `join`, `forget`, `serve`,
`draw` and `demo`.
"""

import shlex
import signal
import sys
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from edge.terminal.formatting import pluralize
from edge_node.cli.help_panels import Panel
from edge_node.cli.line import State, state_folder
from edge_node.cli.option_structs import take_options
from edge_node.cli.shared_options import (
    BrokerOptions,
    Config,
    Http,
    OutputOptions,
    Seed,
    Threads,
    end_on_signals,
    reconcile_with_kit,
    stop_on_signals,
)
from edge_node.extensions.vfl import inference as vfl_inference
from edge_node.extensions.vfl.messages import Denoising, Privacy, Recipe, VflSpec, Window

BUNDLE = "bundle"  # in a state folder: what `serve` serves
# sum of all steps that a sensor takes in a round; with more, those that learn at once overshoot
_STEP = 0.4
# products
_CHUNK = 25
_WINDOW = 10_000

app = typer.Typer()
group = typer.Typer(no_args_is_help=True)
app.add_typer(
    group,
    name="vfl",
    help=(
        "Vertical federated learning: sensors with other features of the same products learn one "
        "model together."
    ),
    epilog="Example: edge-node vfl join --sensor press --columns force,speed --data press.csv",
    rich_help_panel="The sensors of one line",
)


class CoordinateOptions(Struct, frozen=True, kw_only=True):
    """What is learnt of which sensors, and how rounds go."""

    labels: Annotated[
        Path,
        typer.Option(
            help="CSV file with the columns product and label, in order of arrival.",
            show_default=False,
        ),
    ]
    classes: Annotated[
        str,
        typer.Option(
            help="Labels, separated by commas; 0..130 for all whole numbers.", show_default=False
        ),
    ]
    sensors: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas.", show_default="all nodes that the kit names"
        ),
    ] = None
    federation: Annotated[
        str | None,
        typer.Option(help="Name of the federation.", show_default="the kit's, or default"),
    ] = None
    reading: Annotated[
        Literal["class", "expectation"],
        typer.Option(help="expectation: classes are numbers, the result their mean."),
        Panel.TRAINING,
    ] = "class"
    network: Annotated[
        str, typer.Option(help="Network of each sensor: dense, or conv for time series.")
    ] = "dense"
    cycles: Annotated[
        int,
        typer.Option(min=1, help="Rows of a sample: a product's own and those before it."),
        Panel.TRAINING,
    ] = 1
    start: Annotated[
        int, typer.Option(min=1, help="Products of the first round."), Panel.ROUNDS
    ] = 1000
    chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Products that each later round adds.", show_default=str(_CHUNK)),
        Panel.TRAINING,
    ] = None
    window: Annotated[
        int | None,
        typer.Option(min=0, help="Newest products that count; 0: all.", show_default=str(_WINDOW)),
        Panel.TRAINING,
    ] = None
    noise: Annotated[
        str,
        typer.Option(help="Noise added by the link, for studies: levels=3, sigma=0.5 or loss=0.1."),
        Panel.LEAVES,
    ] = "clean"
    denoise: Annotated[
        int,
        typer.Option(
            min=0,
            help="First rounds in which autoencoders learn to denoise; in a long run, all of them.",
        ),
        Panel.TRAINING,
    ] = 0
    denoise_with: Annotated[
        Literal["clean", "noisy"],
        typer.Option(
            help="What autoencoders should reproduce: the embedding, or a second noisy copy."
        ),
        Panel.TRAINING,
    ] = "clean"
    denoiser: Annotated[
        Literal["shared", "each"],
        typer.Option(help="One autoencoder for all sensors, or one for each."),
        Panel.TRAINING,
    ] = "shared"
    clip: Annotated[
        float,
        typer.Option(min=0, help="Length to which embeddings are clipped for protection."),
        Panel.LEAVES,
    ] = 0.0
    protect: Annotated[
        float,
        typer.Option(min=0, help="Noise that protects embeddings, as a multiple of --clip."),
        Panel.LEAVES,
    ] = 0.0
    eta: Annotated[
        float | None,
        typer.Option(help="Learning rate.", show_default=f"{_STEP} / (--iterations x --batches)"),
        Panel.TRAINING,
    ] = None
    batches: Annotated[
        int, typer.Option(min=1, help="Mini-batches of a round, a step each."), Panel.TRAINING
    ] = 1
    iterations: Annotated[
        int,
        typer.Option(min=1, help="Local iterations of a sensor in a round, at most."),
        Panel.TRAINING,
    ] = 2
    head_iterations: Annotated[
        int,
        typer.Option(
            min=0,
            help="Local iterations of the head in a round.",
            show_default="as many as the busiest sensor",
        ),
        Panel.TRAINING,
    ] = 0
    policy: Annotated[
        str,
        typer.Option(
            help=(
                "Who decides local iterations: deadline, all, least, one, proportional, random "
                "or an agent (.onnx)."
            )
        ),
        Panel.TRAINING,
    ] = "deadline"
    absent: Annotated[
        Literal["wait", "last", "impute"],
        typer.Option(help="What a round does when a sensor is absent."),
        Panel.ROUNDS,
    ] = "wait"
    patience: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait before a sensor counts as absent."),
        Panel.ROUNDS,
    ] = 10.0
    commit: Annotated[
        int,
        typer.Option(
            min=1,
            help="Rounds between two checkpoints; after a kill, those since the last are replayed.",
        ),
        Panel.ROUNDS,
    ] = 20
    labels_stay: Annotated[
        bool,
        typer.Option("--labels-stay", help="Sensors see no labels; they get gradients instead."),
        Panel.LEAVES,
    ] = False
    rounds: Annotated[int, typer.Option(min=0, help="Rounds in all.", show_default="for ever")] = 0
    seed: Seed = 0
    threads: Threads = 1
    http: Http = None
    state: Annotated[Path, typer.Option(help="Folder for the head's state.")] = Path("vfl-head")
    new: Annotated[bool, typer.Option("--new", help="Begin another run, from nothing.")] = False
    config: Config = None


@group.command(
    epilog=(
        "Example: edge-node vfl coordinate mqtt://broker.local --sensors press,oven --labels "
        "labels.csv --classes good,bad"
    )
)
@take_options
def coordinate(broker: BrokerOptions, output: OutputOptions, options: CoordinateOptions) -> None:
    """Run the head of a vertical federation: it has the labels, opens rounds,
    and trains the last layer.

    If stopped or killed, it resumes when it is started again with the same --state.
    """
    from importlib.metadata import version

    from broker_config.protocol.messages import REVISION
    from broker_config.storage import disk
    from edge_node.extensions.vfl.channel_noise import parse_channel
    from edge_node.extensions.vfl.policies.selection import check_policy
    from edge_node.extensions.vfl.server import spec as vfl_spec
    from trainer import progress

    end_on_signals()  # until the run begins, there is nothing to leave in order
    endpoint = broker.coordinator_endpoint()
    state = options.state
    rounds = options.rounds
    disk.check_writable(state)
    members = tuple(endpoint.signer.members.nodes) if endpoint.signer else ()
    window, recipe = _choose_pace(options)
    sensors = _parse_names(options.sensors) if options.sensors is not None else members
    labels: Literal["shared", "server"] = "server" if options.labels_stay else "shared"
    spec = VflSpec(
        federation=reconcile_with_kit(options.federation, endpoint, "federation") or "default",
        run=vfl_spec.new_run_id(),
        software=version("edge-node"),
        sensors=sensors,
        network=options.network,
        cycles=options.cycles,
        classes=vfl_spec.parse_classes(options.classes),
        reading=options.reading,
        labels=labels,
        window=window,
        channel=parse_channel(options.noise),
        denoising=Denoising(
            rounds=options.denoise, shared=options.denoiser == "shared", target=options.denoise_with
        ),
        recipe=recipe,
        privacy=Privacy(clip=options.clip, multiplier=options.protect),
        iterations=options.iterations,
        head_iterations=options.head_iterations,
        policy=options.policy,
        absent=options.absent,
        patience=options.patience,
        commit=options.commit,
        seed=options.seed,
        threads=options.threads,
        revision=REVISION,
    )
    vfl_spec.validate(spec)
    check_policy(options.policy, options.iterations, len(spec.sensors))
    with output.reporter() as report:
        report(progress.Step(what="loading torch, which takes seconds"))
        from edge_node.extensions.vfl.server.startup import coordinate as run

        stop = stop_on_signals()
        reached = run(
            spec,
            options.labels,
            endpoint,
            state,
            rounds=rounds,
            new=options.new,
            report=report,
            http=options.http,
            stop=stop,
            deploy=vfl_inference.head_bundle_writer(state / BUNDLE, endpoint.kit),
        )
        report(progress.Result(result={"rounds": reached}))
    if rounds and reached >= rounds:
        if not output.as_json:
            print(_format_next_step(state, broker))
        return
    print("stopped; the same command goes on", file=sys.stderr)
    if rounds:
        raise typer.Exit(130)


def _choose_pace(options: CoordinateOptions) -> tuple[Window, Recipe]:
    """What a round learns from, and how fast: what is left open is as in the run that goes on,
    if one does.

    Raises:
        UsageError: the step is no number above 0.
    """
    from edge_node.extensions.vfl.server.journal import newest_spec

    if options.eta is not None and not options.eta > 0:
        raise UsageError(
            f"with a learning rate of {options.eta:g} nothing is learnt",
            "write for example --eta 0.1",
        )
    begun = None if options.new else newest_spec(options.state)
    chunk, size = (begun.window.chunk, begun.window.size) if begun else (_CHUNK, _WINDOW)
    eta = begun.recipe.eta if begun else _STEP / (options.iterations * options.batches)
    chunk_size = chunk if options.chunk is None else options.chunk
    window_size = size if options.window is None else options.window
    learning_rate = eta if options.eta is None else options.eta
    return (
        Window(start=options.start, chunk=chunk_size, size=window_size),
        Recipe(eta=learning_rate, batches=options.batches),
    )


class JoinOptions(Struct, frozen=True, kw_only=True):
    """A sensor, and where its rows are."""

    columns: Annotated[
        str,
        typer.Option(help="Columns of --data that are this sensor's features.", show_default=False),
    ]
    data: Annotated[
        Path,
        typer.Option(help="CSV file with a row for each product; it may grow.", show_default=False),
    ]
    sensor: Annotated[
        str | None, typer.Option(help="This sensor's name.", show_default="the kit's")
    ] = None
    product: Annotated[str, typer.Option(help="Column with the product's id.")] = "product"
    unit: Annotated[
        str | None,
        typer.Option(
            help="Column that says which rows follow one another: a machine, an engine.",
            show_default="none",
        ),
    ] = None
    condition: Annotated[
        str | None,
        typer.Option(
            help=(
                "Columns with numbers that say the operating condition: a recipe, a load. "
                "Features are scaled within each condition: what rounds to the same whole "
                "numbers."
            ),
            show_default="none",
        ),
    ] = None
    federation: Annotated[
        str | None, typer.Option(help="Name of the federation, if the broker has several.")
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for this sensor's state.", show_default="vfl-SENSOR"),
    ] = None
    wait: Annotated[float, typer.Option(help="Seconds to wait for a head.")] = 600
    config: Config = None


@group.command(
    epilog=(
        "Example: edge-node vfl join mqtt://broker.local --sensor press --columns force,speed "
        "--data press.csv"
    )
)
@take_options
def join(broker: BrokerOptions, output: OutputOptions, options: JoinOptions) -> None:
    """Take part in a vertical federation with one sensor's measurements.

    They stay here; embeddings leave.

    If stopped or killed, it resumes when it is started again with the same --state.
    """
    from trainer import progress

    endpoint = broker.node_endpoint()
    stop = stop_on_signals()
    name = reconcile_with_kit(options.sensor, endpoint, "name")
    if name is None:
        raise UsageError(
            "this sensor's name is missing", "write --sensor NAME, or pass a kit: --kit FILE"
        )
    with output.reporter() as report:
        from edge_node.extensions.vfl.client.join import join as run
        from edge_node.extensions.vfl.line.sensor_rows import RowFile

        settings = _parse_names(options.condition) if options.condition else ()
        source = RowFile(
            options.data, _parse_names(options.columns), options.product, options.unit, settings
        )
        state = options.state or Path(f"vfl-{name}")
        reached, finished = run(
            endpoint,
            name,
            source,
            state,
            federation=reconcile_with_kit(options.federation, endpoint, "federation"),
            wait=options.wait,
            report=report,
            stop=stop,
            deploying=partial(
                vfl_inference.sensor_bundle_writer, state / BUNDLE, source, endpoint.kit
            ),
        )
        report(progress.Result(result={"rounds": reached}))
    if finished and not output.as_json:
        print(_format_next_step(state, broker, options.data))
    if not finished:
        print("stopped; the same command goes on", file=sys.stderr)
        raise typer.Exit(130)


@group.command(epilog="Example: edge-node vfl forget mqtt://broker.local --federation steel")
@take_options
def forget(
    broker: BrokerOptions,
    federation: Annotated[
        str | None,
        typer.Option(help="Name of the federation.", show_default="the kit's, or default"),
    ] = None,
) -> None:
    """Remove what the broker keeps of a vertical federation that nobody runs any more.

    State folders stay.
    """
    from edge_node.extensions.vfl.server.retained_cleanup import remove_retained as run

    endpoint = broker.coordinator_endpoint()
    name = reconcile_with_kit(federation, endpoint, "federation") or "default"
    print(
        f"{pluralize(run(endpoint, name), 'message')} of federation {name!r} removed from "
        f"{endpoint}"
    )


@group.command(
    epilog=(
        "Example: edge-node vfl serve vfl-head/bundle mqtt://broker.local --output "
        "predictions.jsonl"
    )
)
@take_options
def serve(
    bundle: Annotated[
        Path, typer.Argument(help="Bundle in the state folder of coordinate or join.")
    ],
    broker: BrokerOptions,
    data: Annotated[
        Path | None,
        typer.Option(help="A sensor's: CSV file with a row for each product, as given to join."),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option(
            min=0,
            help="The head's: seconds from a product's first embedding to its final prediction.",
        ),
    ] = 1.0,
    output: Annotated[
        Path | None, typer.Option(help="The head's: file for final predictions, a JSON line each.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    state: State = None,
    config: Config = None,
) -> None:
    """Embed new products at a sensor, or predict them at the head:
    the bundle says which of the two it is.

    Runs beside coordinate and join, and loads their newer bundles as they come. With --kit, bundles
    must be signed.
    """
    if not isfinite(deadline):
        raise UsageError(
            f"a deadline of {deadline} seconds never comes, or always",
            "write for example --deadline 1",
        )
    endpoint = broker.endpoint()
    stop = stop_on_signals()
    vfl_inference.serve(
        bundle, endpoint, state or state_folder(), data, output, deadline, threads, stop
    )


@group.command(epilog="Example: edge-node vfl draw drawn --stations 3 --products 2000 --rate 50")
def draw(
    out: Annotated[
        Path, typer.Argument(help="Folder for STATION.csv and labels.csv, which are appended to.")
    ],
    stations: Annotated[
        int, typer.Option(min=2, max=6, help="Stations: press, oven, spindle, ...")
    ] = 3,
    products: Annotated[int, typer.Option(min=1, help="How many products to append.")] = 2000,
    rate: Annotated[
        float, typer.Option(min=0, help="Products a second.", show_default="all at once")
    ] = 0.0,
    seed: Seed = 0,
) -> None:
    """Draw products as several stations would measure them, for trials: all at once,
    or at a rate.
    """
    from edge_node.extensions.vfl.drawn_products import (
        LABELS,
        DrawnStations,
        append_at_rate,
        append_products,
        count_labelled,
    )

    drawn = DrawnStations(stations, seed)
    first = count_labelled(out)
    stop = stop_on_signals()
    if rate:
        products = append_at_rate(drawn, out, range(first, first + products), rate, stop)
    else:
        append_products(drawn, out, first, first + products)
    print(f"{products} products, classes {','.join(drawn.classes)}: {out / LABELS}")
    print("to let sensors learn from them, with a broker and a head on this machine:")
    for name, columns in drawn.stations.items():
        features = ",".join(each.name for each in columns)
        print(
            f"  edge-node vfl join mqtt://127.0.0.1 --sensor {name} --columns {features} --data "
            f"{out / name}.csv"
        )


@group.command(epilog="Example: edge-node vfl demo --keep runs/vfl")
@take_options
def demo(
    output: OutputOptions,
    stations: Annotated[int, typer.Option(min=2, max=6, help="Stations, each with a sensor.")] = 3,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in all.")] = 60,
    seed: Seed = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for everything that the run leaves.")
    ] = None,
) -> None:
    """See it all: a broker, a head and sensors learn together on drawn products,
    then predict new ones.
    """
    import tempfile

    import msgspec
    from rich.console import Console

    from edge_node.extensions.vfl.demo import print_table, run_demo
    from trainer import progress

    # ends like Ctrl-C, the child processes included
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch, output.reporter() as show:
        outcome = run_demo(
            keep or Path(scratch) / "vfl", show, stations=stations, rounds=rounds, seed=seed
        )
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if not output.as_json:
        print_table(outcome, Console())


def _format_next_step(state: Path, broker: BrokerOptions, data: Path | None = None) -> str:
    """How what was learnt is put to use."""
    options = [("--data", data), ("--kit", broker.kit)]
    words = [
        state / BUNDLE,
        *filter(None, [broker.broker]),
        *chain.from_iterable(each for each in options if each[1]),
    ]
    return (
        f"the bundle is in {state / BUNDLE}; next: edge-node vfl serve "
        f"{shlex.join(map(str, words))}"
    )


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
