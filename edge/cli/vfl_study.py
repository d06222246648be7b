"""What researchers ask of lines: `vfl agent`, `vfl experiment`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from broker_config.protocol.errors import UsageError
from edge.cli.grids import DryRun, Store, Workers, run_grid
from edge.cli.options import Events, PlainConfig, Quiet, Seed, Threads, pairs

app = typer.Typer()


@app.command(epilog="Example: edge-node vfl agent --sensors 2 --iterations 5 --out agent.onnx --seed 0")
def agent(
    out: Annotated[Path, typer.Option(help="File for the agent, .onnx; a .zip beside it is what it resumes from.")],
    sensors: Annotated[int, typer.Option(min=1, max=64, help="Sensors of a simulated line.")] = 2,
    iterations: Annotated[int, typer.Option(min=2, help="Local iterations of a sensor in a round, at most.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Of an episode.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Rounds to play in all.")] = 1_000_000,
    measured: Annotated[
        Path | None,
        typer.Option(help="A head's state folder: learn from its measured timings.", show_default="simulate"),
    ] = None,
    seed: Seed = 0,
    threads: Threads = 1,
    quiet: Quiet = False,
    as_json: Events = False,
    config: PlainConfig = None,
) -> None:
    """Train an agent that decides local iterations: vfl coordinate --policy FILE.

    Stopped or killed, it goes on with what it has learnt when it is started again with the same --out.
    """
    import torch
    from rich.console import Console

    from research.dao_vfl.policies.agent_training import table, train
    from research.dao_vfl.policies.measured_timings import read
    from trainer import progress
    from trainer.vfl.policies.latency import Simulated

    if out.suffix != ".onnx":
        raise UsageError(f"an agent is an .onnx file, {out} is none", "write for example --out agent.onnx")
    torch.set_num_threads(threads)
    source = read(measured) if measured else Simulated(sensors)
    with _bar(steps, shown=not (quiet or as_json)) as told:
        reached = train(source, iterations, rounds, steps, seed, out, told)
    with progress.show(as_json=as_json, quiet=quiet) as report:
        policies = {name: each._asdict() for name, each in reached.items()}
        report(progress.Result(result={"agent": str(out), "policies": policies}))
    if not as_json:
        table(reached, Console())
        print(f"next: edge-node vfl coordinate --policy {out} --iterations {iterations} ...")


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int, float], None]]:
    """A progress bar on a terminal: rounds, and what a round earned."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not (shown and sys.stderr.isatty())) as bar:
        task = bar.add_task("training", total=total)
        yield lambda done, earned: bar.update(task, completed=done, description=f"training, {earned:+.2f} a round")


@app.command(
    epilog="Example: edge-node vfl experiment fig6 --data cmapss=cmapss/ --data cifar10=cifar10.npz --preset quick"
)
def experiment(
    name: Annotated[
        str, typer.Argument(help="fig4, fig6, fig7, fig8, fig9, fig10, regret or central.", show_default=False)
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=PATH", help="cmapss: folder of FD002's files; cifar10: NPZ file.", show_default=False
        ),
    ],
    preset: Annotated[
        Literal["quick", "cpu", "full"],
        typer.Option(help="quick: to try it; cpu: for two cores; full: as the paper."),
    ] = "quick",
    rounds: Annotated[int, typer.Option(min=0, help="Rounds in all.", show_default="the preset's")] = 0,
    seeds: Annotated[int, typer.Option(min=0, help="Number of seeds.", show_default="the preset's")] = 0,
    agent: Annotated[
        list[Path], typer.Option(help="Trained by vfl agent, for fig8 to fig10.", show_default="rules only")
    ] = [],
    store: Store = Path("research/results/dao_vfl"),
    workers: Workers = 0,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """Play lines as the DAO-VFL paper has them, then print their table and draw their figure.

    Stopped or killed, it goes on where it was when it is started again.
    """
    from research.dao_vfl.experiment import Experiment, Order

    paths = {key: Path(path) for key, path in pairs(data, "--data", "cmapss={}").items()}
    order = Order(name, preset, paths, rounds, seeds, store, workers, tuple(agent))
    run_grid(partial(Experiment, order), dry_run=dry_run, quiet=quiet, as_json=as_json)
