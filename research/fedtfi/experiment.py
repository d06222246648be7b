"""The experiments of the FedTFI paper, as the runner takes them."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from broker_config.protocol.errors import UsageError
from research.fedtfi import data, figures, reported, tables, variants
from research.fedtfi.cell import Cell, Finished
from research.fedtfi.data import DATASETS, Inputs
from research.fedtfi.grids import TUNE, Plan, grid, tuned
from research.fedtfi.presets import PRESETS
from research.fedtfi.run import run_cell
from research.runner.machine import TORCH
from research.runner.panels import Entry, arrange
from research.runner.paper import Grid, Order, Paper, Report, Work, distinct, parse_weights
from trainer import progress
from trainer.data.class_folders import load, merge
from trainer.models import backbones
from trainer.models.catalogue import KNOWN, suggest_weights
from trainer.models.initial_weights import choose_weights


@dataclass(frozen=True, kw_only=True)
class FedTFIOrder(Order):
    """With initial weights of networks."""

    weights: Sequence[str] = ()  # [MODEL=]NAME or FILE; without a model: of all others


def plan(
    order: FedTFIOrder, finished: Iterable[Finished], show: progress.Report
) -> Grid[Cell, Finished]:
    """Read which images there are, and lay out the grid.

    Raises:
        UsageError: what cannot be, and what to do instead.
    """
    show(progress.Step(what="reading images"))
    sources = data.read(order.data)
    preset = PRESETS[order.preset]
    preset = preset._replace(
        rounds=order.rounds or preset.rounds,
        seeds=order.seeds or preset.seeds,
        studies={name: study for name, study in preset.studies.items() if name in sources},
    )
    if not preset.studies:
        folders = ", ".join(f"--data {name}=FOLDER" for name in DATASETS[preset.tuned_on].folders)
        raise UsageError(
            f"the preset {order.preset} has no experiment with these data sets", f"pass {folders}"
        )
    given = parse_weights(order.weights)
    weights = {
        variant.model: given.get(variant.model) or given.get("") or choose_weights(variant.model)
        for variant in variants.tuned(preset)
    }
    images = {name: data.digest(each) for name, each in sources.items()}
    plan = Plan(
        preset,
        images,
        {model: _digest(each) for model, each in weights.items()},
        TORCH,
        order.device,
    )
    stored = list(finished)
    if order.name != TUNE:
        plan = plan._replace(tuned=tuned(order.name, plan, stored))
        for scenario, trials in plan.tuned.items():
            how = "as tuned" if trials else "with its defaults: not all have been tuned"
            show(progress.Note(text=f"trials with {scenario}: what is compared is run {how}"))
    entries = grid(order.name, plan)
    cells = distinct(entry.cell for entry in entries)
    missing = {cell.key: cell for cell in cells}.keys() - {each.key for each in stored}
    _check_reach(
        {cell.model for cell in cells if cell.key in missing and weights[cell.model] == "imagenet"}
    )

    def inputs(cells: Collection[Cell]) -> Inputs:
        catalogues = {cell.setting.images: sources[cell.setting.data] for cell in cells}
        return Inputs(
            catalogues,
            {
                (digest, size): load(
                    merge(catalogues[digest]), merge(catalogues[digest]).classes, size
                )
                for digest, size in {(cell.setting.images, cell.size) for cell in cells}
            },
            {cell.weights: weights[cell.model] for cell in cells},
        )

    return Grid(cells, inputs, partial(report, order.name, entries))


def report(name: str, entries: Sequence[Entry[Cell]], finished: Mapping[str, Finished]) -> Report:
    """What is finished of an experiment."""
    panels = arrange(entries, finished)
    made, words = tables.make(name, entries, finished, panels)
    conditions = tables.conditions([each.cell for panel in panels for each in panel.results])
    return Report(
        [f"{words} {conditions}"],
        made,
        partial(figures.draw, name, panels) if name in figures.DRAWN else None,
    )


def describe(cell: Cell) -> str:
    """A cell in words."""
    setting = cell.setting
    skew = f"{setting.partition} {setting.classes_per_node or ''}".strip()
    shared = f", {setting.shared} shared" if setting.shared else ""
    return f"{cell.method}, {cell.model}, {setting.data} {skew}{shared}, seed {cell.seed}"


def _metrics(finished: Finished) -> dict[str, float | None]:
    return {"accuracy": finished.accuracy}


def _work(cell: Cell) -> Work:
    setting, training = cell.setting, cell.training
    images = setting.nodes * (setting.samples + setting.shared)
    return (cell.method, cell.model), float(cell.rounds * training.local_epochs * images)


FEDTFI = Paper(reported.TITLES, data.FOLDERS, Finished, plan, run_cell, describe, _metrics, _work)


def _check_reach(models: Iterable[str]) -> None:
    """Refuse ImageNet's weights that cannot be had,
    before cells fail one after another for want of them.
    """
    # one for each file
    for model in {KNOWN[model].imagenet: model for model in sorted(models)}.values():
        if not backbones.can_download(model):
            raise UsageError(
                f"the ImageNet weights for {model!r} are out of reach",
                f"connect to the internet once, or {suggest_weights(model)}",
            )


def _digest(weights: str) -> str:
    """None, imagenet, or the digest of a file; UsageError if there is no such file."""
    if weights in ("none", "imagenet"):
        return weights
    try:
        with Path(weights).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(
            f"there is no weights file {weights}",
            "pass none, imagenet or an existing .safetensors file",
        ) from error
