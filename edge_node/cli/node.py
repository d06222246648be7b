"""Commands of a plant: `check`, `join`, `preview`, `refit`, `report`, `export`."""

import json
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError
from edge_node.cli.help_panels import Panel
from edge_node.cli.option_structs import take_options
from edge_node.cli.shared_options import (
    BrokerOptions,
    Config,
    Group,
    Json,
    KitFile,
    OutputOptions,
    end_on_signals,
    interrupted_by_keyboard,
    open_kit,
    parse_pairs,
    reconcile_with_kit,
    stop_on_signals,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

    from broker_config.mqtt.client import Endpoint
    from trainer.progress import Report

app = typer.Typer()

_STOPPED_NODE = "stopped; the same command goes on"

Alias = Annotated[
    list[str],
    typer.Option(
        metavar="NAME=CLASS",
        help=(
            "The folder NAME has images of the federation's CLASS, e.g. Kratzer=scratches. "
            "Repeatable."
        ),
    ),
    Panel.IMAGES,
]


@app.command(epilog="Example: edge-node check images/ --test held-out/")
def check(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of labelled images: one folder a class.", show_default=False),
    ],
    test: Annotated[Path | None, typer.Option(help="Folder of held-out images, likewise.")] = None,
    group: Group = None,
    classes: Annotated[
        str,
        typer.Option(
            help="Classes of the federation, A,B,C: whether each folder is called like one."
        ),
    ] = "",
    alias: Alias = [],
    size: Annotated[
        int, typer.Option(min=1, help="Width and height of the network's input, pixels.")
    ] = 128,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="File for a contact sheet.", show_default="edge-node-check.png; none with --json"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a plant's images before it joins. Exit code 1 if it cannot join with them."""
    import msgspec
    from rich.console import Console

    from trainer import progress
    from trainer.data.checks import findings_output
    from trainer.data.checks.check_run import check_folders, image_options

    aliases = parse_pairs(alias, "--alias", "{}=scratches")
    with (
        progress.reporter(as_json=False, quiet=as_json) as show,
        progress.watched(show),
    ):
        report = check_folders(
            folder,
            test,
            size,
            lambda entries: progress.steps("checking images", entries),
            group,
            [name.strip() for name in classes.split(",") if name.strip()],
            aliases,
        )
    if not report.facts:
        picture = None
    elif picture is None and not as_json:
        picture = Path("edge-node-check.png")
    if not as_json:  # before the picture, which may have no place
        findings_output.print_table(report, Console())
    if picture:
        findings_output.draw_contact_sheet(report, picture)
    if as_json:
        print(msgspec.json.encode(findings_output.summarise(report, picture)).decode())
    else:
        if picture:
            print(f"picture: {picture}")
        if not group:
            findings_output.print_groups(report, Path("edge-node-groups.csv"), Console())
        if report.can_join:
            print(f"next: {_join_command(folder, image_options(test, group, aliases))}")
    code = 0 if report.can_join else 1
    raise typer.Exit(code)


def host_name() -> str:
    """Return the name of this machine, as a node may be called."""
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9_.-]+", "", platform.node())[:64] or "plant-1"


def _find_kit() -> str | None:
    """Return the only kit in this folder, if it is a node's."""
    found = list(Path().glob("*.kit"))
    if len(found) != 1 or found[0].stem in (topics.COORDINATOR, topics.MONITOR):
        return None
    return str(found[0])


def _join_command(folder: Path, options: list[str]) -> str:
    """The command that joins with the images that were checked,
    as the node that this folder is set up for.
    """
    kit = _find_kit()
    if Path("node.toml").exists():
        node = ["--config", "node.toml"]
    else:
        node = ["--kit", kit] if kit else ["BROKER_URL", "--name", host_name()]
    return shlex.join(["edge-node", "join", *node, "--data", str(folder), *options])


class NodeOptions(Struct, frozen=True, kw_only=True):
    """Who takes part in which federation, with what, and on which conditions."""

    name: Annotated[
        str | None, typer.Option(help="This node's name.", show_default="the kit's")
    ] = None
    group: Group = None
    federation: Annotated[
        str | None, typer.Option(help="Name of the federation, if the broker has several.")
    ] = None
    alias: Alias = []
    demand: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help=(
                "Take part only if this holds. Where patches are exchanged: noise=1, mix=4, "
                "levels=8, what at least hides images in them. Where sums are: images=2, of each "
                "class here; nodes=3, that close a round. masked=3: nobody reads what it "
                "contributes but in sums of three or more, which takes four nodes. Where a "
                "federation is private: epsilon=3, that it may spend of these images at "
                "most. Extensions know more names: one that nobody knows is refused with all that "
                "are known."
            ),
        ),
        Panel.LEAVES,
    ] = []
    wait: Annotated[float, typer.Option(help="Seconds to wait for a coordinator.")] = 600
    config: Config = None


class JoinOptions(Struct, frozen=True, kw_only=True):
    """The images that a node trains with, its state, and what it tells the coordinator."""

    data: Annotated[
        Path | None,
        typer.Option(help="Folder of labelled images: one folder a class.", show_default=False),
    ] = None
    no_images: Annotated[
        bool,
        typer.Option(
            "--no-images",
            help=(
                "This plant has no labelled image: take the model of a finished federation that "
                "is served."
            ),
        ),
    ] = False
    test: Annotated[
        Path | None,
        typer.Option(help="Folder of held-out images; by default a share of --data."),
        Panel.IMAGES,
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for this node's state.", show_default="edge-node-NAME"),
    ] = None
    telemetry: Annotated[
        bool,
        typer.Option(
            "--telemetry",
            help="Send the coordinator the metrics of every round, accuracy among them.",
        ),
        Panel.LEAVES,
    ] = False
    like: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Bundle of an earlier model, which proposes a class for folders that are called "
                "otherwise."
            )
        ),
        Panel.IMAGES,
    ] = None


class PreviewOptions(Struct, frozen=True, kw_only=True):
    """The images that a preview counts, and where it is kept."""

    data: Annotated[
        Path,
        typer.Option(help="Folder of labelled images: one folder a class.", show_default=False),
    ]
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for this node's state.", show_default="edge-node-NAME-preview"),
    ] = None


@app.command(epilog="Example: edge-node join mqtt://broker.local --data images/ --name plant-a")
@take_options
def join(
    broker: BrokerOptions, output: OutputOptions, options: JoinOptions, node: NodeOptions
) -> None:
    """Take part in a federation with this plant's images. The images stay here."""
    from trainer import progress
    from trainer.federation.client.join import join as run

    data = options.data
    if options.no_images == (data is not None) or (options.no_images and options.test):
        fault = (
            "this plant's images are missing"
            if data is None and not options.no_images
            else "--no-images excludes --data and --test"
        )
        raise UsageError(
            fault,
            "name their folder with --data; or say --no-images, for a finished federation's "
            "model without any",
        )
    endpoint, name = _open_node(broker, node)
    stop = stop_on_signals(_STOPPED_NODE)
    with output.reporter() as report:
        model = run(
            endpoint,
            name=name,
            folder=data,
            test=options.test,
            group=node.group,
            state=options.state or Path(f"edge-node-{name}"),
            federation=reconcile_with_kit(node.federation, endpoint, "federation"),
            telemetry=options.telemetry,
            demands=parse_pairs(node.demand, "--demand", "{}=1"),
            aliases=parse_pairs(node.alias, "--alias", "{}=scratches"),
            like=options.like,
            confirm=_confirm_with(report),
            wait=node.wait,
            report=report,
            stop=stop,
        )
        if model:
            report(progress.Result(result={"model": str(model)}))
    if model is None:
        print(_STOPPED_NODE, file=sys.stderr)
        raise typer.Exit(130)
    if not output.as_json:
        signed = f" --kit {broker.kit}" if broker.kit else ""
        print(f"personal model: {model}\nnext: edge-node export {model} --out bundles{signed}")


@app.command(epilog="Example: edge-node preview mqtt://broker.local --data images/ --name plant-a")
@take_options
def preview(
    broker: BrokerOptions, output: OutputOptions, options: PreviewOptions, node: NodeOptions
) -> None:
    """Tell what joining would give this plant, before any training: one message of sums,
    no image leaves.

    The coordinator runs `edge-node coordinate --method gaussian`. It hears the sums alone.
    """
    from trainer import progress
    from trainer.federation.client.join import join as run

    endpoint, name = _open_node(broker, node)
    stop = stop_on_signals(_STOPPED_NODE)
    with output.reporter() as report:
        file = run(
            endpoint,
            name=name,
            folder=options.data,
            test=None,
            group=node.group,
            state=options.state or Path(f"edge-node-{name}-preview"),
            federation=reconcile_with_kit(node.federation, endpoint, "federation"),
            telemetry=False,
            demands=parse_pairs(node.demand, "--demand", "{}=1"),
            aliases=parse_pairs(node.alias, "--alias", "{}=scratches"),
            confirm=_confirm_with(report),
            wait=node.wait,
            report=report,
            stop=stop,
            preview=True,
        )
        if file:
            report(progress.Result(result=json.loads(file.read_bytes())))
    if file is None:
        print(_STOPPED_NODE, file=sys.stderr)
        raise typer.Exit(130)
    if not output.as_json:
        print(f"preview: {file}\nnext: edge-node join, once the coordinator runs the federation")


def _open_node(broker: BrokerOptions, node: NodeOptions) -> "tuple[Endpoint, str]":
    """The broker as this node reaches it, and the node's name."""
    endpoint = broker.node_endpoint()
    known = reconcile_with_kit(node.name, endpoint, "name")
    if known is None:
        raise UsageError(
            "this node's name is missing", "choose one with --name, or pass a kit: --kit FILE"
        )
    return endpoint, known


def _confirm_with(report: "Report") -> "Callable[[str], bool] | None":
    """A way to ask a person; None where nobody sits at the terminal,
    or only events and errors are shown.
    """
    from trainer.progress import LiveReport

    if not isinstance(report, LiveReport) or not sys.stdin.isatty():
        return None

    def confirm(question: str) -> bool:
        with report.paused(), interrupted_by_keyboard():
            return typer.confirm(question)

    return confirm


@app.command(
    epilog=(
        "Example: edge-node refit edge-node-plant-a/model images/ --out edge-node-plant-a/refitted"
    )
)
@take_options
def refit(
    model: Annotated[
        Path, typer.Argument(help="Personal model with a head of statistics.", show_default=False)
    ],
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of labelled images, as they are now: one folder a class.",
            show_default=False,
        ),
    ],
    output: OutputOptions,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the new model.", show_default="MODEL-refitted")
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="Folder of held-out images; by default a share of FOLDER.")
    ] = None,
    group: Group = None,
    alias: Alias = [],
    without: Annotated[
        list[str],
        typer.Option(metavar="CLASS", help="A class that the model shall never name. Repeatable."),
    ] = [],
) -> None:
    """Make a personal model anew with images added, removed or relabelled: exactly,
    in seconds, without a network.
    """
    from trainer import progress

    aliases = parse_pairs(alias, "--alias", "{}=scratches")
    target = out or model.with_name(f"{model.name}-refitted")
    with output.reporter() as report:
        report(progress.Step(what="loading torch"))
        from trainer.training import personal_model
        from trainer.training.refit import refit as run

        with progress.watched(report):
            made = run(model, folder, test, group=group, aliases=aliases, without=without)
        personal_model.save(made.model, target)
        for note in made.notes:
            report(progress.Note(text=note))
        report(progress.Result(result={"model": str(target)}))
    if not output.as_json:
        print(
            f"personal model: {target}\n"
            f"next: edge-node export {target} --out bundles  (with --kit FILE for a line that has "
            f"--trust)\n"
            f"then edge-node bundle add bundles/{made.model.metadata.node}, for a line that runs"
        )


@app.command(epilog="Example: edge-node report edge-node-plant-a")
@take_options
def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="The --out folder of demo or simulate, or the state folder of join or coordinate.",
            show_default=False,
        ),
    ],
    output: OutputOptions,
    out: Annotated[
        Path | None, typer.Option(help="File for the page.", show_default="RUN/report.html")
    ] = None,
) -> None:
    """Write a self-contained web page about a run: its results, shown on images."""
    from trainer import progress
    from trainer.report.report_page import write

    with output.reporter() as show:
        page = write(run, out or run / "report.html", show)
        show(progress.Result(result={"report": str(page)}))
    if not output.as_json:
        print(f"report: {page.resolve().as_uri()}")


@app.command(
    epilog="Example: edge-node export edge-node-plant-a/model --out bundles --kit plant-a.kit"
)
@take_options
def export(
    models: Annotated[
        list[Path],
        typer.Argument(help="Personal models from join or simulate.", show_default=False),
    ],
    output: OutputOptions,
    out: Annotated[Path, typer.Option(help="Folder for the bundles, one for each node.")] = Path(
        "bundles"
    ),
    kit: KitFile = None,
    days: Annotated[int, typer.Option(min=1, help="How long a signed bundle may be served.")] = 365,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8", help="Quantise to int8 if held-out images and speed allow it; else keep fp32."
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Class folders with a model's images, if they have been moved."),
    ] = None,
) -> None:
    """Turn personal models into bundles for the line: ONNX, checked against torch;
    signed with --kit.
    """
    from broker_config.storage import disk
    from trainer import progress
    from trainer.training import model_folder

    for folder in models:
        model_folder.check(folder)
    disk.check_writable(out)
    # asks for the passphrase before torch takes its seconds
    opened = open_kit(kit) if kit else None
    end_on_signals()
    with output.reporter() as report:
        report(progress.Step(what="loading torch and the exporter: 2 to 20 s"))
        from export.bundle_export import Optimisations
        from export.bundle_export import export as run
        from export.bundle_signing import Signer

        signer = Signer(opened, days) if opened else None
        written = run(models, out, report, signer, Optimisations(int8, data))
        report(progress.Result(result={"bundles": [str(each.folder) for each in written]}))
    if not output.as_json:
        print(f"bundles: {', '.join(str(each.folder) for each in written)}")
        trust = f" --trust {trust_file(kit, written[0].node)}" if kit else ""
        print(
            f"next: edge-node serve {written[0].folder}{trust}\n"
            f"or, for a line that runs: edge-node bundle add {written[0].folder}"
        )


def trust_file(kit: Path, node: str) -> Path:
    """Return the node's trust file: beside its kit where the node has made its keys itself, else
    where provision writes it.
    """
    beside = kit.with_name(f"{node}.trust")
    provisioned = kit.parent.parent / "trust" / beside.name
    return provisioned if provisioned.exists() and not beside.exists() else beside
