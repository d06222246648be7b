"""One experiment from its name to its table: what is asked for, what is missing, and what came of it."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from broker_config.protocol.errors import UsageError, nearest
from research.fedtfi import contenders, data, figures, tables, views
from research.fedtfi.cell import Cell, Finished
from research.fedtfi.data import Material
from research.fedtfi.grids import EXPERIMENTS, TUNE, Plan, distinct, grid, tuned
from research.fedtfi.presets import PRESETS
from research.fedtfi.run import run_cell
from research.runner.cells import Cells, Work
from research.runner.machine import TORCH
from research.runner.store import Records
from trainer import progress
from trainer.data.class_folders import load, union
from trainer.models import backbones
from trainer.models.catalogue import FEATURES, instead
from trainer.models.initial_weights import suited_weights
from trainer.models.texture.texture_presets import PRESETS as FIRST
from trainer.training.simulation import Device, check_device


class Order(NamedTuple):
    """What a user asks for. Zeros stand for the preset's."""

    name: str
    preset: str
    data: Mapping[str, Path]
    weights: Sequence[str]  # [MODEL=]NAME or FILE; without a model: of all others
    rounds: int
    seeds: int
    store: Path
    workers: int  # 0 = as suits the device
    device: Device = "cpu"


class Experiment(Cells[Cell, Finished]):
    """A grid of federations, some of them finished already."""

    def __init__(self, order: Order, show: progress.Report):
        """Read which images there are.

        Raises:
            UsageError: what cannot be, and what to do instead.
        """
        if order.name not in EXPERIMENTS:
            raise UsageError(f"there is no experiment {order.name!r}", nearest(order.name, EXPERIMENTS))
        check_device(order.device)
        show(progress.Step(what="reading images"))
        self._name, self._sources = order.name, data.read(order.data)
        preset = PRESETS[order.preset]
        preset = preset._replace(
            rounds=order.rounds or preset.rounds,
            seeds=order.seeds or preset.seeds,
            studies={name: study for name, study in preset.studies.items() if name in self._sources},
        )
        self._weights = _weights(order.weights, {who.model for who in contenders.everyone(preset)})
        images = {name: data.digest(sources) for name, sources in self._sources.items()}
        weights = {model: _digest(weights) for model, weights in self._weights.items()}
        plan = Plan(preset, images, weights, TORCH, order.device)
        records = Records(order.store / "cells.jsonl", Finished)
        if order.name != TUNE:
            plan = plan._replace(tuned=tuned(order.name, plan, list(records)))
            for scenario, trials in plan.tuned.items():
                how = "as tuned" if trials else "with its defaults: not all have been tuned"
                show(progress.Note(text=f"trials with {scenario}: what is compared is run {how}"))
        self.entries = grid(order.name, plan)
        super().__init__(distinct(self.entries), records, order.store, order.workers, order.device)
        _check_reach({cell.model for cell in self.missing() if self._weights[cell.model] == "imagenet"})

    def material(self, cells: Collection[Cell]) -> Material:
        """What these cells of it need; images are decoded now."""
        sources = {cell.setting.images: self._sources[cell.setting.data] for cell in cells}
        return Material(
            sources,
            {
                (images, size): load(union(sources[images]), union(sources[images]).classes, size)
                for images, size in {(cell.setting.images, cell.size) for cell in cells}
            },
            {cell.weights: self._weights[cell.model] for cell in cells},
        )

    def tell(self, console: Console) -> list[Path]:
        """Print its tables, draw its figure, and return the files that it has written.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        finished = self.finished()
        table = tables.show(self._name, self.entries, finished, self.folder, console)
        return [table, *figures.draw(self._name, views.panels(self.entries, finished), self.folder)]

    def _task(self) -> tuple[Callable[[Cell, Material], Finished], Material]:
        return run_cell, self.material(self.missing())

    def _told(self, cell: Cell) -> str:
        return describe(cell)

    def _figures(self, finished: Finished) -> dict[str, float | None]:
        return {"accuracy": finished.accuracy}

    def _work(self, cell: Cell) -> Work:
        setting, training = cell.setting, cell.training
        return (cell.method, cell.model), float(
            cell.rounds * training.local_epochs * setting.nodes * (setting.samples + setting.shared)
        )


def describe(cell: Cell) -> str:
    """A cell in words."""
    setting = cell.setting
    skew = f"{setting.partition} {setting.classes_per_node or ''}".strip()
    shared = f", {setting.shared} shared" if setting.shared else ""
    return f"{cell.method}, {cell.model}, {setting.data} {skew}{shared}, seed {cell.seed}"


def _weights(given: Sequence[str], models: Iterable[str]) -> dict[str, str]:
    """Initial weights by network."""
    found = {}
    for text in given:
        model, equals, weights = text.rpartition("=")
        if equals and model not in FEATURES:
            raise UsageError(f"there is no model {model!r}", nearest(model, FEATURES))
        found[model] = weights
    return {model: found.get(model) or found.get("") or suited_weights(model) for model in models}


def _check_reach(models: Iterable[str]) -> None:
    """Refuse ImageNet's weights that cannot be had, before cells fail one after another for want of them."""
    for model in {FIRST[model].imagenet: model for model in sorted(models)}.values():  # one for each file
        if not backbones.within_reach(model):
            raise UsageError(
                f"the ImageNet weights for {model!r} are out of reach",
                f"connect to the internet once, or {instead(model)}",
            )


def _digest(weights: str) -> str:
    """What a name or a file is known by; UsageError if there is no such file."""
    if weights in ("none", "imagenet"):
        return weights
    try:
        with Path(weights).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(
            f"there is no weights file {weights}", "pass none, imagenet or an existing .safetensors file"
        ) from error
