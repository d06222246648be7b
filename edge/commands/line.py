"""Recognising alone: `export`, `serve`, `infer`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from broker_config.errors import UsageError
from edge.commands.options import Ca, Cert, Config, Events, Json, Key, Quiet, end_on_signals, make_endpoint

app = typer.Typer()


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

    end_on_signals()
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

    endpoint = make_endpoint(mqtt, ca, cert, key) if mqtt else None
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
