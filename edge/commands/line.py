"""Recognising alone: `export`, `serve`, `infer`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker_config.errors import UsageError
from edge.commands.options import (
    Ca,
    Cert,
    Events,
    Json,
    Key,
    KitFile,
    LineConfig,
    Quiet,
    end_on_signals,
    open_kit,
)

if TYPE_CHECKING:
    from edge.verify import Guard

app = typer.Typer()

TrustFile = Annotated[
    Path | None,
    typer.Option(
        "--trust",
        help="Load only what this trust file's node has signed, and nothing older than was served.",
        metavar="FILE",
    ),
]
Memory = Annotated[
    Path | None,
    typer.Option(
        help="Folder that remembers what was served; only the line should write there. With --trust.",
        show_default="systemd's StateDirectory, else ~/.local/state/edge-node",
    ),
]
ServeOlder = Annotated[
    bool,
    typer.Option(
        "--accept-older",
        help="Go back to this older bundle on purpose; it alone then passes without this too, until a newer is served.",
    ),
]
InferOlder = Annotated[
    bool, typer.Option("--accept-older", help="Judge with an older bundle on purpose, this once; nothing remembers it.")
]


@app.command(epilog="Example: edge-node export edge-node-plant-a/model --out bundles --kit plant-a.kit")
def export(
    models: Annotated[
        list[Path], typer.Argument(help="Personal models that join or simulate left.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the bundles, one a node.")] = Path("bundles"),
    kit: KitFile = None,
    days: Annotated[int, typer.Option(min=1, help="How long a signed bundle may be served.")] = 365,
    int8: Annotated[
        bool, typer.Option("--int8", help="Serve integers where held-out images and a clock allow it; else fp32 stays.")
    ] = False,
    student: Annotated[
        bool, typer.Option("--student", help="Serve one encoder in place of a fused two where that is as right.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Class folders with a model's images, if they are not where it says.")
    ] = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """Turn personal models into bundles for the line: ONNX, checked against torch; signed with --kit."""
    from trainer import progress

    opened = open_kit(kit) if kit else None  # asks for the passphrase before torch takes its seconds
    end_on_signals()
    with progress.show(as_json=as_json, quiet=quiet) as report:
        report(progress.Step(what="loading torch and the exporter: 2 to 20 s"))
        from export.onnx import Wish
        from export.onnx import export as run
        from export.signing import Signer

        signer = Signer(opened, days) if opened else None
        written = run(models, out, report, signer, Wish(int8, student, data))
        report(progress.Result(result={"bundles": [str(each.folder) for each in written]}))
    if not as_json:
        print(f"bundles: {', '.join(str(each.folder) for each in written)}")
        print(f"next: edge-node serve {written[0].folder}{f' --trust {written[0].node}.trust' if signer else ''}")


def _guard(trust: Path | None, memory: Path | None, accept_older: bool, *, remembers: bool) -> "Guard | None":
    """What the options insist on."""
    if trust is None:
        if memory or accept_older:
            raise UsageError("--memory and --accept-older are of use with --trust only", "add --trust FILE")
        return None
    from broker_config.trust import read
    from edge.verify import Guard

    return Guard(read(trust), memory or _state_folder(), accept_older, remembers)


def _state_folder() -> Path:
    """Where the line may remember: systemd's StateDirectory (the first of them), else as freedesktop.org has it."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "edge-node"


@app.command(epilog="Example: edge-node serve bundles/plant-a --trust plant-a.trust --watch camera/")
def serve(
    context: typer.Context,
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
    trust: TrustFile = None,
    memory: Memory = None,
    accept_older: ServeOlder = False,
    config: LineConfig = None,
) -> None:
    """Judge images as they come: over HTTP and from a watched folder."""
    from edge.assembly import Site
    from edge.daemon import serve as run
    from edge.settings import Settings, extended

    settings = extended(context.obj or Settings(), watch, output, mqtt, ca, cert, key)
    guard = _guard(trust, memory, accept_older, remembers=True)
    site = Site(line, memory or _state_folder())
    raise typer.Exit(run(bundle, settings, site, host=host, port=port, threads=threads, guard=guard))


@app.command(epilog="Example: edge-node infer bundles/plant-a image.jpg")
def infer(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.", show_default=False)],
    images: Annotated[list[Path], typer.Argument(help="Image files.", show_default=False)],
    threads: Annotated[int, typer.Option(min=0, help="CPU threads.", show_default="2, or the cores there are")] = 0,
    trust: TrustFile = None,
    memory: Memory = None,
    accept_older: InferOlder = False,
    as_json: Json = False,
) -> None:
    """Judge image files, once. Exit code 2 if one of them cannot be read."""
    import msgspec

    from edge.line import judge_files
    from edge.verdict import Failure

    failed = False
    guard = _guard(trust, memory, accept_older, remembers=False)
    for outcome in judge_files(bundle, images, guard, threads):
        failed |= isinstance(outcome, Failure)
        if as_json:
            print(msgspec.json.encode(outcome).decode())
        elif isinstance(outcome, Failure):
            print(f"{outcome.error}\n  What to do: {outcome.remedy}", file=sys.stderr)
        else:
            print(f"{outcome.image}: {outcome.label} ({outcome.confidence:.1%})")
    raise typer.Exit(UsageError.exit_code if failed else 0)
