"""For a first look, before a plant has labelled images: `demo`, `broker`, `surfaces`."""

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from broker_config.protocol.errors import EdgeNodeError
from edge.cli.options import (
    CLASSES,
    ROUNDS,
    SAMPLES,
    SUITED_WEIGHTS,
    WEIGHTS,
    Events,
    Method,
    Model,
    Nodes,
    Options,
    Quiet,
    Seed,
    Settings,
    make_request,
    stop_on_signals,
    tell_weights,
)

app = typer.Typer()


@app.command(epilog="Example: edge-node demo --data images/ --nodes 5 --rounds 30")
def demo(
    data: Annotated[Path | None, typer.Option(help="Folder of labelled images; without it, images are drawn.")] = None,
    nodes: Nodes = 5,
    rounds: Annotated[int | None, typer.Option(min=1, help=ROUNDS, show_default="30; 20 on drawn images")] = None,
    method: Method = "afedcl",
    option: Options = [],
    model: Model = "mobilenet_v2",
    weights: Annotated[str, typer.Option(help=WEIGHTS, show_default=f"{SUITED_WEIGHTS}; surface on drawn images")] = "",
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

    from trainer import progress
    from trainer.demo.federation_demo import run
    from trainer.models.catalogue import SURFACE
    from trainer.report import summary

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, the child processes included
    rounds, size = rounds or (30 if data else 20), size or (0 if data else 64)
    if data is None and model in SURFACE:
        weights = weights or "surface"  # a demo without a folder needs no connection either
    request = make_request(method, option, model, weights, size, training, rounds, seed, evaluate_every=2)
    with progress.reporter(as_json=as_json, quiet=quiet) as show:
        tell_weights(request, weights, show)
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
    summary.print_table(outcome, Console())
    print(f"bundles: {out / 'bundles'}\nreport: {(out / 'report.html').resolve().as_uri()}")


@app.command(epilog="Example: edge-node broker --port 1883")
def broker(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 1883,
    host: Annotated[str, typer.Option(help="Address to listen on. Anybody who reaches it may connect.")] = "127.0.0.1",
    kind: Annotated[Literal["auto", "mosquitto", "amqtt"], typer.Option(help="Which broker.")] = "auto",
    folder: Annotated[Path, typer.Option(help="Folder for its configuration and log.")] = Path("broker-state"),
) -> None:
    """Start a broker: mosquitto if it is installed, else the embedded one. For trials; it knows no passwords."""
    import time

    from broker_config.broker.embedded import address_for_others, start_broker

    stop = stop_on_signals()
    with start_broker(folder, port=port, host=host, kind=kind) as running:
        print(f"{running.kind} is listening on {running.url}; Ctrl-C ends it", flush=True)
        if others := address_for_others(host):
            print(f"other machines reach it at mqtt://{others}:{running.port}", flush=True)
        while not stop():
            if running.process.poll() is not None:
                raise EdgeNodeError("the broker has ended", f"see its log in {folder}")
            time.sleep(0.2)


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
    from trainer.data.drawn_surfaces import write_plants

    with progress.reporter(as_json=as_json, quiet=quiet) as show:
        count = write_plants(out, plants, per_class, size, seed, show)
        show(progress.Result(result={"folder": str(out), "images": count}))
    if not as_json:
        print(f"{count} images: {out}   some of them: {out / 'contact-sheet.png'}")
        print(f"next: edge-node join BROKER_URL --data {out / 'plant-1'} --name plant-1")
