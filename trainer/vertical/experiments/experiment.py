"""One experiment from its name to its table: what is asked for, what is missing, and what came of it."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from broker_config.errors import UsageError, nearest
from edge.words import about, some
from trainer import progress
from trainer.experiments.machine import TORCH, machine
from trainer.experiments.processes import over_processes
from trainer.experiments.store import Records
from trainer.experiments.tally import Failed, State, judge
from trainer.vertical.adaptive.live import OnnxAgent
from trainer.vertical.experiments import data, figures, paper, tables, views
from trainer.vertical.experiments.cell import Cell, Finished
from trainer.vertical.experiments.data import Material
from trainer.vertical.experiments.grids import GRIDS, Plan, distinct, valued
from trainer.vertical.experiments.presets import PRESETS, Study
from trainer.vertical.experiments.run import attempt
from trainer.vertical.window import span


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


class Experiment:
    """A grid of cells, some of them finished already."""

    def __init__(self, order: Order, show: progress.Report):
        """Read the data.

        Raises:
            UsageError: what cannot be, and what to do instead.
        """
        if order.name not in GRIDS:
            raise UsageError(f"there is no experiment {order.name!r}", f"take one of {', '.join(GRIDS)}")
        _check_data(order.data)
        self._order = order
        self._records = Records(order.store / "cells.jsonl", Finished)
        self._workers = order.workers or len(os.sched_getaffinity(0))
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
        self.cells = distinct(self.entries)

    def missing(self) -> list[Cell]:
        """What is not finished."""
        there = self.finished()
        return [cell for cell in self.cells if cell.key not in there]

    def finished(self) -> dict[str, Finished]:
        """All that is finished in the store, by key; of equal keys the first."""
        return {each.key: each for each in reversed(list(self._records))}

    def state(self) -> State:
        """How far it is."""
        missing = self.missing()
        return State(len(self.cells), len(missing), self._estimate(missing))

    def describe(self, state: State) -> str:
        """That in words."""
        done = f"{state.cells - state.missing} of {some(state.cells, 'cell')} finished in {self._order.store}"
        if not state.missing:
            return done
        if state.seconds is None:
            return f"{done}; how long the rest takes is known once some of each kind has been played"
        return f"{done}; the rest takes {about(state.seconds)} with {some(self._workers, 'worker')}"

    def run(self, show: progress.Report) -> list[Failed[Cell]]:
        """Run what is missing, storing each result as it comes; returns what failed, which is tried again next time."""
        left = {cell.key: cell for cell in self.missing()}
        total, failed = len(left), []
        show(progress.Step(what=f"{total} of {len(self.cells)} cells to run"))
        with closing(over_processes(self._workers, attempt, list(left.values()), self._material)) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes if total else ():
                cell = left.pop(outcome.cell.key)
                if isinstance(outcome, Failed):
                    failed.append(outcome)
                    show(progress.Note(text=f"failed: {describe(cell)}: {outcome.error}"))
                    continue
                self._records.add([outcome])
                show(_event(outcome, total - len(left), total, self._estimate(left.values())))
        return failed

    def tell(self, console: Console) -> list[Path]:
        """Print its tables, draw its figure, and return the files that it has written.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        name, folder = self._order.name, self._order.store
        panels = views.panels(self.entries, self.finished())
        return [tables.show(name, panels, folder, console), figures.draw(name, panels, folder)]

    def _estimate(self, cells: Iterable[Cell]) -> float | None:
        ran = [(*_work(each.cell), each.seconds) for each in self.finished().values() if each.machine == machine()]
        return judge([_work(cell) for cell in cells], ran, self._workers)


def describe(cell: Cell) -> str:
    """A cell in words."""
    noise = f"{cell.channel.levels} levels" if cell.channel.levels else "no noise"
    denoised = f", denoised {cell.denoising.rounds} rounds" if cell.denoising.rounds else ""
    steps = cell.policy or "E = " + " ".join(map(str, cell.iterations))
    return f"{cell.kind}, {paper.DATASETS[cell.split.data]}, {noise}{denoised}, {steps}, seed {cell.seed}"


def _event(finished: Finished, done: int, total: int, left: float | None) -> progress.CellFinished:
    last = finished.last
    return progress.CellFinished(
        done=done,
        total=total,
        cell=describe(finished.cell),
        accuracy=last.accuracy if last else None,
        rmse=last.rmse if last else None,
        seconds=finished.seconds,
        left=left,
    )


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
            f"train another: edge-node line agent {known}" if known else "leave --agent out: nothing here takes one",
        )
    return line


def _check_data(given: Mapping[str, Path]) -> None:
    if not given:
        raise UsageError("an experiment needs data", f"pass --data NAME=PATH, NAME of {', '.join(paper.DATASETS)}")
    for name in given:
        if name not in paper.DATASETS:
            raise UsageError(f"there is no data set {name!r}", nearest(name, paper.DATASETS))
