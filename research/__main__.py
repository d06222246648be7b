"""`python -m research`: the experiments of three papers,
and agents that decide local iterations.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge_node.cli.main import run
from edge_node.cli.shared_options import (
    ROUNDS,
    SUITED_WEIGHTS,
    WEIGHTS,
    Config,
    Events,
    Quiet,
    Seed,
    Threads,
    parse_pairs,
)
from research.afedcl.datasets import DATASETS

if TYPE_CHECKING:
    from research.runner.paper import C, F, O, Paper

RESULTS = Path("research/results")

PRESETS = "quick: to try it; cpu: hours on two cores; full: as the paper, for a GPU"
NumberOfRounds = Annotated[int, typer.Option(min=0, help=ROUNDS, show_default="the preset's")]
Seeds = Annotated[int, typer.Option(min=0, help="Number of seeds.", show_default="the preset's")]
Store = Annotated[
    Path, typer.Option(help="Folder of results; what is finished there is not run again.")
]
Workers = Annotated[
    int, typer.Option(min=0, help="Processes, a thread each.", show_default="all cores")
]
Ray = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT", help="Run on this Ray cluster instead; auto: this machine's."
    ),
]
Device = Annotated[
    Literal["cpu", "cuda"],
    typer.Option(help="Where nodes train; on a GPU with one worker by default."),
]
Again = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Only run this finished cell again (its key in cells.jsonl), and compare.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what is left to do, and how long it takes.")
]

app = typer.Typer(
    name="research",
    help=(
        "The experiments of three papers: each runs what is missing of a grid, then prints its "
        "tables and draws its figure. If stopped or killed, it resumes when it is started again."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(
    epilog=(
        "Example: python -m research afedcl table2 --preset quick --data neu=NEU-CLS/ --data "
        "xsdd=X-SDD/"
    )
)
def afedcl(
    name: Annotated[
        str,
        typer.Argument(
            help=(
                "table2, fig4, fig5, fig7 to fig10, joining, consensus, scarce, around, trained, "
                "codecs, private, private_training; tune before them; or factors."
            ),
            show_default=False,
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FOLDER",
            help=f"Class folders of a data set: {', '.join(DATASETS)}.",
            show_default=False,
        ),
    ],
    preset: Annotated[
        Literal["quick", "cpu", "paper", "full"],
        typer.Option(
            help=f"{PRESETS}; paper: as cpu, with the paper's learning rate and draw of classes."
        ),
    ] = "quick",
    model: Annotated[str, typer.Option(help="Backbone.")] = "mobilenet_v2",
    weights: Annotated[
        list[str],
        typer.Option(
            metavar="[MODEL=]WEIGHTS",
            help=f"{WEIGHTS} MODEL= for one of several (fig9).",
            show_default=SUITED_WEIGHTS,
        ),
    ] = [],
    size: Annotated[
        int,
        typer.Option(
            min=0, help="Width and height of images, pixels.", show_default="the preset's"
        ),
    ] = 0,
    rounds: NumberOfRounds = 0,
    seeds: Seeds = 0,
    store: Store = RESULTS / "afedcl",
    workers: Workers = 0,
    ray: Ray = "",
    device: Device = "cpu",
    dry_run: DryRun = False,
    again: Again = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """AFedCL (Cui et al., 2024): federations of classifiers."""
    from research.afedcl.experiment import AFEDCL, AFedCLOrder

    order = AFedCLOrder(
        name=name,
        preset=preset,
        data=_paths(data, "neu={}"),
        model=model,
        weights=weights,
        size=size,
        rounds=rounds,
        seeds=seeds,
        store=store,
        workers=workers,
        ray=ray,
        device=device,
    )
    _run(AFEDCL, order, dry_run=dry_run, again=again, quiet=quiet, as_json=as_json)


@app.command(
    epilog="Example: python -m research fedtfi table2 --preset quick --data kth=KTH-TIPS2-a/"
)
def fedtfi(
    name: Annotated[
        str,
        typer.Argument(
            help=(
                "table2, table4, fig6 to fig10, fuse, leak, negatives, consensus; tune before them."
            ),
            show_default=False,
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FOLDER",
            help=(
                "Class folders of a data set: kth (with folders sample_a to sample_d); neu and "
                "xsdd together."
            ),
            show_default=False,
        ),
    ],
    preset: Annotated[
        Literal["quick", "cpu", "sgd", "pieces", "full"],
        typer.Option(
            help=(
                f"{PRESETS}; sgd: as quick, all with the paper's optimiser; pieces: as quick, "
                "whole pieces of cloth held out."
            )
        ),
    ] = "quick",
    weights: Annotated[
        list[str],
        typer.Option(
            metavar="[MODEL=]WEIGHTS",
            help=f"{WEIGHTS} MODEL= for one of several networks.",
            show_default=SUITED_WEIGHTS,
        ),
    ] = [],
    rounds: NumberOfRounds = 0,
    seeds: Seeds = 0,
    store: Store = RESULTS / "fedtfi",
    workers: Workers = 0,
    ray: Ray = "",
    device: Device = "cpu",
    dry_run: DryRun = False,
    again: Again = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """FedTFI (Peng et al., 2022): federations of texture networks."""
    from research.fedtfi.experiment import FEDTFI, FedTFIOrder

    order = FedTFIOrder(
        name=name,
        preset=preset,
        data=_paths(data, "kth={}"),
        weights=weights,
        rounds=rounds,
        seeds=seeds,
        store=store,
        workers=workers,
        ray=ray,
        device=device,
    )
    _run(FEDTFI, order, dry_run=dry_run, again=again, quiet=quiet, as_json=as_json)


@app.command(
    epilog=(
        "Example: python -m research dao-vfl fig6 --preset quick --data cmapss=cmapss/ --data "
        "cifar10=cifar10.npz"
    )
)
def dao_vfl(
    name: Annotated[
        str,
        typer.Argument(
            help=(
                "fig4, fig6, fig7, fig8, fig9, fig10, regret or central; tune, and curve, "
                "before them."
            ),
            show_default=False,
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=PATH",
            help=(
                "cmapss, cmapss_fd001, cmapss_fd003 or cmapss_fd004: folder of NASA's files; "
                "cifar10: NPZ file."
            ),
            show_default=False,
        ),
    ],
    preset: Annotated[
        Literal["quick", "cpu", "minibatch", "full"],
        typer.Option(
            help=(
                f"{PRESETS}; minibatch: as cpu, with 32 steps an iteration (CIFAR-10: 8) instead "
                "of one."
            )
        ),
    ] = "quick",
    agents: Annotated[
        list[Path],
        typer.Option(
            "--agent",
            help="Trained by python -m research agent, for fig8 to fig10.",
            show_default="rules only",
        ),
    ] = [],
    rounds: NumberOfRounds = 0,
    seeds: Seeds = 0,
    store: Store = RESULTS / "dao_vfl",
    workers: Workers = 0,
    ray: Ray = "",
    dry_run: DryRun = False,
    again: Again = None,
    quiet: Quiet = False,
    as_json: Events = False,
) -> None:
    """DAO-VFL (Wang et al., 2025): vertical federations of sensors."""
    from research.dao_vfl.experiment import DAO_VFL, DAOVFLOrder

    order = DAOVFLOrder(
        name=name,
        preset=preset,
        data=_paths(data, "cmapss={}"),
        agents=agents,
        rounds=rounds,
        seeds=seeds,
        store=store,
        workers=workers,
        ray=ray,
    )
    _run(DAO_VFL, order, dry_run=dry_run, again=again, quiet=quiet, as_json=as_json)


@app.command(
    epilog="Example: python -m research agent --sensors 2 --iterations 5 --out agent.onnx --seed 0"
)
def agent(
    out: Annotated[
        Path, typer.Option(help="File for the agent, .onnx; its checkpoint is the .zip beside it.")
    ],
    sensors: Annotated[int, typer.Option(min=1, max=64, help="Simulated sensors.")] = 2,
    iterations: Annotated[
        int, typer.Option(min=2, help="Local iterations of a sensor in a round, at most.")
    ] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of an episode.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Rounds to play in all.")] = 1_000_000,
    data: Annotated[
        Literal["cmapss", "cifar10"],
        typer.Option(help="Data set whose learning curve it learns from."),
    ] = "cmapss",
    measured: Annotated[
        Path | None,
        typer.Option(
            help="A head's state folder: learn from its measured timings.", show_default="simulate"
        ),
    ] = None,
    seed: Seed = 0,
    threads: Threads = 1,
    quiet: Quiet = False,
    as_json: Events = False,
    config: Config = None,  # noqa: ARG001  (its callback has read it)
) -> None:
    """Train an agent that decides the sensors' local iterations:
    edge-node vfl coordinate --policy FILE.

    If stopped or killed, it resumes from its checkpoint when it is started again with the same
    --out.
    """
    import torch
    from rich.console import Console

    from edge_node.extensions.vfl.policies.latency import SimulatedTimings
    from research.dao_vfl.policies.agent_training import table, train
    from research.dao_vfl.policies.measured_timings import read
    from research.dao_vfl.presets import WORTH
    from trainer import progress

    if out.suffix != ".onnx":
        raise UsageError(
            f"an agent is an .onnx file, {out} is none", "write for example --out agent.onnx"
        )
    torch.set_num_threads(threads)
    source = read(measured) if measured else SimulatedTimings(sensors)
    with _bar(steps, shown=not (quiet or as_json)) as update:
        policies = train(source, WORTH[data, 1], iterations, rounds, steps, seed, out, update)
    with progress.reporter(as_json=as_json, quiet=quiet) as show:
        means = {name: each._asdict() for name, each in policies.items()}
        show(progress.Result(result={"agent": str(out), "policies": means}))
    if not as_json:
        table(policies, Console())
        print(f"next: edge-node vfl coordinate --policy {out} --iterations {iterations} ...")


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int, float], None]]:
    """A progress bar on a terminal, with the rounds played and the reward of a round."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not (shown and sys.stderr.isatty())) as bar:
        task = bar.add_task("training", total=total)
        yield lambda done, reward: bar.update(
            task, completed=done, description=f"training, {reward:+.2f} a round"
        )


def _paths(given: list[str], example: str) -> dict[str, Path]:
    return {name: Path(path) for name, path in parse_pairs(given, "--data", example).items()}


def _run(
    paper: "Paper[O, C, F]",
    order: "O",
    *,
    dry_run: bool,
    again: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run what is missing of an experiment, then report it; EdgeNodeError if a cell failed."""
    import msgspec
    from rich.console import Console

    from research.runner.experiment import Experiment
    from trainer import progress

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    with progress.reporter(as_json=as_json, quiet=quiet) as show:
        experiment = Experiment(paper, order, show)
        if again is not None:
            show(progress.Step(what=f"running {again} again"))
            repeated = experiment.run_again(again)
            text = experiment.describe_again(repeated)
            show(
                progress.Result(
                    result={"key": repeated.stored.key, "same": repeated.is_same, "text": text}
                )
            )
            if not as_json:
                print(text)
            raise typer.Exit(0 if repeated.is_same else 1)
        failed = [] if dry_run else experiment.run(show)
        state = experiment.state()
        files = [] if dry_run else experiment.report(Console(quiet=as_json))
        outcome = {
            **msgspec.to_builtins(state),
            "failed": len(failed),
            "files": [str(file) for file in files],
        }
        show(progress.Result(result=outcome))
    if not as_json:
        print(experiment.describe(state), *files, sep="\n")
    if failed:
        none_stored = state.missing == state.cells
        raise EdgeNodeError(
            f"{len(failed)} of {state.cells} cells failed; the first: {failed[0].error}",
            "mend that first, then give the same command again"
            if none_stored
            else "the others are stored; the same command tries these again",
        )


if __name__ == "__main__":
    run(app, "research")
