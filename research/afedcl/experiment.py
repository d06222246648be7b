"""The experiments of the AFedCL paper, as the runner takes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from broker_config.protocol.errors import UsageError, suggest
from broker_config.protocol.messages import Training
from research.afedcl import figures, labels, reported, tables, tuning
from research.afedcl.cell import Cell, Finished
from research.afedcl.data import Sources
from research.afedcl.datasets import DATASETS
from research.afedcl.grids import GRIDS, PRESETS, Plan, Preset
from research.afedcl.run import run_cell
from research.runner.machine import TORCH
from research.runner.paper import Grid, Order, Paper, Report, Work, parse_weights
from research.runner.tuning import Trial
from trainer import progress
from trainer.federation.server.spec import suited_training
from trainer.models import backbones
from trainer.models.catalogue import FEATURES, find_shipped
from trainer.models.initial_weights import choose_weights

_BACKBONES = ("mobilenet_v2", "resnet18", "resnet50")  # of Fig. 9


@dataclass(frozen=True, kw_only=True)
class AFedCLOrder(Order):
    """With the network that most experiments have."""

    model: str = "mobilenet_v2"
    weights: Sequence[str] = ()  # [MODEL=]NAME or FILE; without a model: of `model`
    size: int = 0


def plan(
    order: AFedCLOrder, finished: Iterable[Finished], show: progress.Report
) -> Grid[Cell, Finished]:
    """Read images and weights, and lay out the grid.

    Raises:
        UsageError: what cannot be, and what to do instead.
    """
    if order.model not in FEATURES:
        raise UsageError(f"there is no model {order.model!r}", suggest(order.model, FEATURES))
    weights = _weights(order)
    show(progress.Step(what="reading images and weights"))
    sources = Sources(order.data, weights)
    # whether weights can be downloaded takes a while to say
    candidates = _BACKBONES if order.name == "fig9" else ()
    preset = PRESETS[order.preset]
    plan = Plan(
        preset=preset._replace(
            size=order.size or preset.size,
            rounds=order.rounds or preset.rounds,
            seeds=order.seeds or preset.seeds,
        ),
        images=sources.images,
        model=order.model,
        encoder=sources.encoder,
        backbones=tuple(name for name in candidates if _within_reach(name, weights[name])),
        training=_training(preset, weights[order.model]),
        tuned={},
        torch=TORCH,
        device=order.device,
    )
    if not preset.learning_rate:
        plan = plan._replace(tuned=_tuned(plan, finished))
    if order.name not in ("tune", "factors"):
        tuned = (
            "as tuned" if plan.tuned else "with its defaults: there is no tuning of them all yet"
        )
        if preset.learning_rate:
            tuned = f"with the paper's learning rate of {preset.learning_rate:g}, untuned"
        show(progress.Note(text=f"every method is run {tuned}"))
    if left_out := [name for name in candidates if name not in plan.backbones]:
        show(
            progress.Note(
                text=f"left out, since their weights are out of reach: {', '.join(left_out)}"
            )
        )
    cells = GRIDS[order.name](plan)
    return Grid(cells, sources.inputs, partial(report, order.name, cells))


def report(name: str, cells: Sequence[Cell], found: Mapping[str, Finished]) -> Report:
    """What is finished of an experiment."""
    finished = [found[cell.key] for cell in cells if cell.key in found]
    words, made = tables.make(name, finished)
    conditions = labels.conditions(each.cell for each in finished)
    return Report(
        [" ".join([conditions, *words])],
        made,
        partial(figures.draw, name, finished) if name in figures.DRAWN else None,
    )


def describe(cell: Cell) -> str:
    """A cell in words."""
    setting = cell.setting
    method = f"{cell.method} {cell.codec}" if cell.codec else cell.method
    method += f" epsilon {cell.privacy['epsilon']}" if cell.privacy else ""
    return (
        f"{method}, {setting.dataset} {setting.partition} {setting.samples}, {cell.model}, seed "
        f"{cell.seed}"
    )


def _metrics(finished: Finished) -> dict[str, float | None]:
    return {"accuracy": finished.mean("accuracy")}


def _work(cell: Cell) -> Work:
    return (cell.model, cell.size), float(cell.rounds * cell.setting.nodes * cell.setting.samples)


AFEDCL = Paper(reported.TITLES, DATASETS, Finished, plan, run_cell, describe, _metrics, _work)


def _training(preset: Preset, weights: str) -> Training:
    training = suited_training(weights)
    return msgspec.structs.replace(
        training, learning_rate=preset.learning_rate or training.learning_rate
    )


def _tuned(plan: Plan, finished: Iterable[Finished]) -> dict[str, Trial]:
    def is_comparable(cell: Cell) -> bool:
        same = (cell.model, cell.size) == (plan.model, plan.preset.size)
        return same and cell.weights == plan.encoder(plan.model, cell.seed)

    return tuning.choose(
        (*plan.preset.methods, *plan.preset.others), plan.training, finished, is_comparable
    )


def _weights(order: AFedCLOrder) -> dict[str, str]:
    """Initial weights by model; those that are not given are of the same kind."""
    given = {
        model or order.model: weights for model, weights in parse_weights(order.weights).items()
    }
    main = given.get(order.model) or choose_weights(order.model)
    others = main if main in ("none", "surface", "imagenet") else "imagenet"
    return {**dict.fromkeys(FEATURES, others), order.model: main, **given}


def _within_reach(model: str, weights: str) -> bool:
    if find_shipped(model, weights):
        return True
    return weights != "surface" and (weights != "imagenet" or backbones.can_download(model))
