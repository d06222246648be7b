"""One experiment from its name to its table: what is asked for, what is missing, and what came of it."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from broker_config.protocol.errors import UsageError, nearest
from research.dao_vfl import data, figures, paper, tables, views
from research.dao_vfl.cell import Cell, Finished
from research.dao_vfl.data import Material
from research.dao_vfl.grids import GRIDS, Plan, distinct, valued
from research.dao_vfl.presets import PRESETS, Study
from research.dao_vfl.run import run_cell
from research.runner.cells import Cells, Work
from research.runner.machine import TORCH
from research.runner.store import Records
from trainer import progress
from trainer.vfl.policies.selection import OnnxAgent
from trainer.vfl.window import span


class Order(NamedTuple):
    """What a user asks for. Zeros stand for the preset's."""

    name: str
    preset: str
    data: Mapping[str, Path]
    rounds: int
    seeds: int
    store: Path
    workers: int  # 0 = all cores
    agents: tuple[Path, ...] = ()  # trained policies, of lines with different numbers of sensors


class Experiment(Cells[Cell, Finished]):
    """A grid of lines, some of them played already."""

    def __init__(self, order: Order, show: progress.Report):
        """Read the data.

        Raises:
            UsageError: what cannot be, and what to do instead.
        """
        if order.name not in GRIDS:
            raise UsageError(f"there is no experiment {order.name!r}", f"take one of {', '.join(GRIDS)}")
        _check_data(order.data)
        self._name = order.name
        show(progress.Step(what="reading data"))
        read = {name: data.read(name, path) for name, path in order.data.items()}
        for name, (_, source) in read.items():
            train, test = data.counts(source)
            show(progress.Note(text=f"{paper.DATASETS[name]}: {train} samples for training, {test} for the test"))
        studies = _studies(order)
        agents = {_decides(path, studies): path.read_bytes() for path in order.agents}
        digests = {line: hashlib.sha256(content).hexdigest()[:16] for line, content in agents.items()}
        self._material = Material(dict(read.values()), {digests[line]: content for line, content in agents.items()})
        plan = Plan(studies, {name: digest for name, (digest, _) in read.items()}, TORCH, digests)
        self.entries = GRIDS[order.name](plan)
        records = Records(order.store / "cells.jsonl", Finished)
        super().__init__(distinct(self.entries), records, order.store, order.workers)

    def tell(self, console: Console) -> list[Path]:
        """Print its tables, draw its figure, and return the files that it has written.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        panels = views.panels(self.entries, self.finished())
        return [
            tables.show(self._name, panels, self.folder, console),
            figures.draw(self._name, panels, self.folder),
        ]

    def _task(self) -> tuple[Callable[[Cell, Material], Finished], Material]:
        return run_cell, self._material

    def _told(self, cell: Cell) -> str:
        return describe(cell)

    def _figures(self, finished: Finished) -> dict[str, float | None]:
        last = finished.last
        return {"accuracy": last.accuracy if last else None, "rmse": last.rmse if last else None}

    def _work(self, cell: Cell) -> Work:
        return _work(cell)


def describe(cell: Cell) -> str:
    """A cell in words."""
    noise = f"{cell.channel.levels} levels" if cell.channel.levels else "no noise"
    denoised = f", denoised {cell.denoising.rounds} rounds" if cell.denoising.rounds else ""
    steps = cell.policy or "E = " + " ".join(map(str, cell.iterations))
    return f"{cell.kind}, {paper.DATASETS[cell.split.data]}, {noise}{denoised}, {steps}, seed {cell.seed}"


def _work(cell: Cell) -> tuple[tuple[str, str, str, int], float]:
    """A kind of work, and how much of it: passes over samples."""
    samples = sum(last - first for first, last in (span(cell.window, each) for each in range(1, cell.rounds + 1)))
    kind = (cell.kind, cell.split.data, cell.network, cell.recipe.batches)
    return kind, 1.0 if cell.kind == "offline" else float(samples * (sum(cell.iterations) + max(cell.iterations)))


def _studies(order: Order) -> dict[str, Study]:
    found = {}
    for name in order.data:
        study = PRESETS[order.preset][name]
        found[name] = study._replace(rounds=order.rounds or study.rounds, seeds=order.seeds or study.seeds)
    return found


def _decides(path: Path, studies: Mapping[str, Study]) -> tuple[int, int]:
    """The number of sensors and E_max that an agent was trained for; UsageError if nothing that is played is so."""
    agent = OnnxAgent(path)
    line = agent.sensors, agent.iterations
    lines = sorted({(study.sensors, study.most) for study in valued(studies).values()})
    if line not in lines:
        known = " or ".join(f"--sensors {sensors} --iterations {most}" for sensors, most in lines)
        raise UsageError(
            f"the agent {path} decides for {line[0]} sensors and up to {line[1]} iterations, as no line here",
            f"train another: python -m research agent {known}"
            if known
            else "leave --agent out: nothing here takes one",
        )
    return line


def _check_data(given: Mapping[str, Path]) -> None:
    if not given:
        raise UsageError("an experiment needs data", f"pass --data NAME=PATH, NAME of {', '.join(paper.DATASETS)}")
    for name in given:
        if name not in paper.DATASETS:
            raise UsageError(f"there is no data set {name!r}", nearest(name, paper.DATASETS))
