"""Command `anomaly`: a bundle from good images alone."""

from pathlib import Path
from typing import Annotated

import typer

from edge_node.cli.shared_options import Json, end_on_signals

app = typer.Typer()


@app.command(
    epilog="Example: edge-node anomaly good/ --defects defects/ --out bundles/line-1",
    rich_help_panel="On the line",
)
def anomaly(
    good: Annotated[
        Path, typer.Argument(help="Folder of images without a defect.", show_default=False)
    ],
    defects: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images with a defect: says how many are found, and changes nothing."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The bundle's folder; its name is the model's.")] = Path(
        "bundles/good-only"
    ),
    size: Annotated[
        int, typer.Option(min=32, max=1024, help="Pixels to which an image, or a tile, is resized.")
    ] = 224,
    as_json: Json = False,
) -> None:
    """Make a bundle from good images alone: the line tells what is strange, and where,
    until there are labels.

    It needs no labels, no training and no other plants. 20 good images or more, as different as
    good ones are.
    """
    import msgspec
    from rich.console import Console
    from rich.progress import track

    end_on_signals()
    stderr = Console(stderr=True)
    with stderr.status("loading torch and the exporter: 2 to 20 s"):
        from edge_node.extensions.anomaly.anomaly_export import export_anomaly_detector as run

    report = run(
        good,
        defects,
        out,
        size,
        lambda images: track(
            images, "reading images", console=stderr, transient=True, disable=not stderr.is_terminal
        ),
    )
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    print(f"bundle: {report.bundle}, from {report.images} good images")
    print(f"good images that it rejects: {report.false_rejects}, each judged without itself")
    if report.found is not None:
        print(f"images of defects that it finds: {report.found}; AUROC {report.auroc:.1%}")
    print(f"next: edge-node serve {report.bundle}")
