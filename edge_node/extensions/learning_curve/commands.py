"""Command `learning-curve`: whether a plant has enough images, and of which class it wants more."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker_config.protocol.errors import UsageError
from edge.config.retired import RETIRED_OPTIONS
from edge_node.cli.node import Alias
from edge_node.cli.shared_options import Group, Json, parse_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from edge_node.extensions.learning_curve.learning_curve import LearningCurve

# once an option of a command that knows no extension
RETIRED_OPTIONS["check --learning-curve"] = "use the command: edge-node learning-curve FOLDER"

_SIZE = 128

app = typer.Typer()


@app.command(
    rich_help_panel="A plant that takes part",
    epilog="Example: edge-node learning-curve images/ --test held-out/",
)
def learning_curve(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of labelled images, one folder a class; or the model that join left.",
            show_default=False,
        ),
    ],
    test: Annotated[Path | None, typer.Option(help="Folder of held-out images, likewise.")] = None,
    group: Group = None,
    alias: Alias = [],
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Width and height of the network's input, pixels.",
            show_default=str(_SIZE),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell whether there are enough images, of which class more are wanted, and which look wrong
    in their folder.

    Needs torch, and a tenth of a second an image. No image leaves the plant.
    """
    import msgspec
    from rich.console import Console

    from edge.bundle.bundle_format import PERSONAL_MODEL
    from trainer import progress

    of_model = (folder / PERSONAL_MODEL).exists()
    if of_model and (test or group or alias or size):
        raise UsageError(
            f"{folder} is a model, which knows its images and their size",
            "leave out --test, --group, --alias and --size, or give a folder of images",
        )
    aliases = parse_pairs(alias, "--alias", "{}=scratches")
    with (
        progress.reporter(as_json=False, quiet=as_json) as show,
        progress.watched(show),
    ):
        from edge_node.extensions.learning_curve.enough_images import trace_folder, trace_model

        def track(numbers: range) -> "Iterable[int]":
            return progress.steps("looking at images", numbers)

        if of_model:
            curve = trace_model(folder, track)
        else:
            curve = trace_folder(folder, test, size or _SIZE, group, aliases, track)
    if curve is None:
        raise UsageError(
            f"there is no learning curve of {folder}: it has no classifier of sums, its training "
            "has seen every image, the sums hold noise, or too few images are as they were",
            "give the folder of images instead",
        )
    if as_json:
        print(msgspec.json.encode(curve).decode())
    else:
        _print_curve(curve, Console())


def _print_curve(curve: "LearningCurve", console: "Console") -> None:
    """Print how many images of each class there are, how many are right, and what follows."""
    from rich.table import Column, Table
    from rich.text import Text

    drawn = Table(Column("images of each class", justify="right"), "right", "95 % interval")
    for point in curve.points:
        share = point.accuracy
        drawn.add_row(
            f"{point.images}", f"{share.value:.0%}", f"{share.low:.0%} to {share.high:.0%}"
        )
    console.print(drawn)
    for line in curve.describe("--json"):
        console.print(Text(line), soft_wrap=True)
