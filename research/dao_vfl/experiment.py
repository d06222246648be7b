"""The experiments of the DAO-VFL paper, as the runner takes them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.policies.selection import OnnxAgent
from research.dao_vfl import data, figures, measures, reported, tables
from research.dao_vfl.cell import Cell, Finished
from research.dao_vfl.data import Inputs
from research.dao_vfl.grids import GRIDS, Plan, valued
from research.dao_vfl.presets import PRESETS, Study
from research.dao_vfl.run import run_cell
from research.runner.machine import TORCH
from research.runner.panels import Entry, arrange
from research.runner.paper import Grid, Order, Paper, Report, Work, distinct
from trainer import progress


@dataclass(frozen=True, kw_only=True)
class DAOVFLOrder(Order):
    """With agents that decide local iterations."""

    agents: Sequence[Path] = ()  # for different numbers of sensors


def plan(
    order: DAOVFLOrder,
    finished: Iterable[Finished],  # noqa: ARG001
    show: progress.Report,
) -> Grid[Cell, Finished]:
    """Read the data, and lay out the grid.

    Raises:
        UsageError: what cannot be, and what to do instead.
    """
    show(progress.Step(what="reading data"))
    read = {name: data.read(name, path) for name, path in order.data.items()}
    for name, (_, source) in read.items():
        train, test = data.counts(source)
        show(
            progress.Note(
                text=f"{reported.DATASETS[name]}: {train} samples for training, {test} for the test"
            )
        )
    studies = _studies(order)
    agents = {_fitting(path, studies): path.read_bytes() for path in order.agents}
    digests = {fits: hashlib.sha256(content).hexdigest()[:16] for fits, content in agents.items()}
    inputs = Inputs(
        dict(read.values()), {digests[fits]: content for fits, content in agents.items()}
    )
    entries = GRIDS[order.name](
        Plan(studies, {name: digest for name, (digest, _) in read.items()}, TORCH, digests)
    )
    cells = distinct(entry.cell for entry in entries)
    return Grid(cells, lambda _: inputs, partial(report, order.name, entries))


def report(name: str, entries: Sequence[Entry[Cell]], finished: Mapping[str, Finished]) -> Report:
    """What is finished of an experiment."""
    panels = arrange(entries, finished)
    claim = f"The paper: {reported.CLAIMS[name]}"
    conditions = measures.conditions(each.cell for panel in panels for each in panel.results)
    made = [tables.table(name, panel) for panel in panels]
    return Report(
        [claim, f"{tables.LEGEND} {conditions}"], made, partial(figures.draw, name, panels)
    )


def describe(cell: Cell) -> str:
    """A cell in words."""
    noise = f"{cell.channel.levels} levels" if cell.channel.levels else "no noise"
    denoised = f", denoised {cell.denoising.rounds} rounds" if cell.denoising.rounds else ""
    steps = cell.policy or "E = " + " ".join(map(str, cell.iterations))
    return (
        f"{cell.kind}, {reported.DATASETS[cell.split.data]}, {noise}{denoised}, {steps}, seed "
        f"{cell.seed}"
    )


def _metrics(finished: Finished) -> dict[str, float | None]:
    last = finished.last
    return {"accuracy": last.accuracy if last else None, "rmse": last.rmse if last else None}


def _work(cell: Cell) -> Work:
    """Passes over samples."""
    samples = sum(
        last - first
        for first, last in (cell.window.span(each) for each in range(1, cell.rounds + 1))
    )
    kind = (cell.kind, cell.split.data, cell.network, cell.recipe.batches)
    return kind, 1.0 if cell.kind == "offline" else float(
        samples * (sum(cell.iterations) + max(cell.iterations))
    )


DAO_VFL = Paper(
    reported.TITLES, reported.DATASETS, Finished, plan, run_cell, describe, _metrics, _work
)


def _studies(order: DAOVFLOrder) -> dict[str, Study]:
    studies = {name: PRESETS[order.preset][name] for name in order.data}
    return {
        name: study._replace(rounds=order.rounds or study.rounds, seeds=order.seeds or study.seeds)
        for name, study in studies.items()
    }


def _fitting(path: Path, studies: Mapping[str, Study]) -> tuple[int, int]:
    """The number of sensors and E_max that an agent was trained for;
    UsageError if no study has these.
    """
    agent = OnnxAgent(path)
    own = agent.sensors, agent.iterations
    known = {name: (study.sensors, study.most) for name, study in valued(studies).items()}
    if own not in known.values():
        others = " or ".join(
            f"--data {name} --sensors {known[name][0]} --iterations {known[name][1]}"
            for name in known
        )
        raise UsageError(
            f"the agent {path} decides for {own[0]} sensors and up to {own[1]} iterations, as no "
            "cell here",
            f"train another: python -m research agent {others}"
            if others
            else "leave out --agent: no cell takes one",
        )
    return own
