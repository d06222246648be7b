"""For a first look at sensors that learn together: `vfl draw`, `vfl demo`."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Events, Quiet, Seed, stop_on_signals

app = typer.Typer()


@app.command(epilog="Example: edge-node vfl draw drawn --stations 3 --products 2000 --rate 50")
def draw(
    out: Annotated[Path, typer.Argument(help="Folder for STATION.csv and labels.csv, which are appended to.")],
    stations: Annotated[int, typer.Option(min=2, max=6, help="Stations: press, oven, spindle, ...")] = 3,
    products: Annotated[int, typer.Option(min=1, help="How many products to append.")] = 2000,
    rate: Annotated[float, typer.Option(min=0, help="Products a second.", show_default="all at once")] = 0.0,
    seed: Seed = 0,
) -> None:
    """Draw what the sensors of a line measure, for trials: all at once, or as it would come."""
    from trainer.data.drawn_products import LABELS, DrawnStations, append_at_rate, append_products, count_labelled

    line, first, stop = DrawnStations(stations, seed), count_labelled(out), stop_on_signals()
    if rate:
        products = append_at_rate(line, out, range(first, first + products), rate, stop)
    else:
        append_products(line, out, first, first + products)
    print(f"{products} products, classes {','.join(line.classes)}: {out / LABELS}")
    print("to let sensors learn from them, with a broker and a head on this machine:")
    for name, columns in line.stations.items():
        features = ",".join(each.name for each in columns)
        print(f"  edge-node vfl join mqtt://127.0.0.1 --sensor {name} --columns {features} --data {out / name}.csv")


@app.command(epilog="Example: edge-node vfl demo --keep runs/vfl")
def demo(
    stations: Annotated[int, typer.Option(min=2, max=6, help="Stations, each with a sensor.")] = 3,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in all.")] = 60,
    seed: Seed = 0,
    keep: Annotated[Path | None, typer.Option(help="Folder for everything that the run leaves.")] = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """See it all: a broker, a head and sensors learn together on drawn products, then judge new ones."""
    import tempfile

    import msgspec
    from rich.console import Console

    from trainer import progress
    from trainer.demo.vfl_demo import print_table, run_demo

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, the child processes included
    with tempfile.TemporaryDirectory() as scratch, progress.reporter(as_json=as_json, quiet=quiet) as show:
        outcome = run_demo(keep or Path(scratch) / "vfl", show, stations=stations, rounds=rounds, seed=seed)
        show(progress.Result(result=msgspec.to_builtins(outcome)))
    if not as_json:
        print_table(outcome, Console())
