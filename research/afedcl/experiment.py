"""One experiment from its name to its table: what is asked for, what is missing, and what came of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from broker_config.protocol.errors import UsageError, nearest
from research.afedcl import figures, tables, tuning
from research.afedcl.bench import Bench, Material
from research.afedcl.cell import Cell, Finished
from research.afedcl.grids import DATASETS, GRIDS, PRESETS, Plan
from research.afedcl.run import Done, run_cell
from research.runner.cells import Cells, Work
from research.runner.cluster import over_cluster
from research.runner.machine import TORCH
from research.runner.store import Store
from trainer import progress
from trainer.federation.server.spec import suited_training
from trainer.models import backbones
from trainer.models.catalogue import FEATURES, SURFACE
from trainer.models.initial_weights import suited_weights
from trainer.training.simulation import Device, check_device

_BACKBONES = ("mobilenet_v2", "resnet18", "resnet50")  # of Fig. 9


class Order(NamedTuple):
    """What a user asks for. Zeros stand for the preset's."""

    name: str
    preset: str
    data: Mapping[str, Path]
    model: str
    weights: Sequence[str]  # [MODEL=]NAME or FILE; without a model: of `model`
    size: int
    rounds: int
    seeds: int
    store: Path
    workers: int  # 0 = as suits the device
    ray: str = ""  # address of a Ray cluster; empty = this machine's processes
    device: Device = "cpu"


class Experiment(Cells[Cell, Finished]):
    """A grid of cells, some of them finished already."""

    def __init__(self, order: Order, show: progress.Report):
        """Read images and weights.

        Raises:
            UsageError: what cannot be, and what to do instead.
        """
        if order.name not in GRIDS:
            raise UsageError(f"there is no experiment {order.name!r}", nearest(order.name, GRIDS))
        if order.model not in FEATURES:
            raise UsageError(f"there is no model {order.model!r}", nearest(order.model, FEATURES))
        _check_data(order.data)
        _check_device(order)
        self._order, self._store = order, Store(order.store)
        self._embeds = order.name == "fig7"
        show(progress.Step(what="reading images and weights"))
        weights = _weights(order)
        self._bench = Bench(order.data, weights)
        plan = self._plan(weights)
        plan = plan._replace(tuned=self._tuned(plan))
        if order.name not in ("tune", "factors"):
            tuned = "as tuned" if plan.tuned else "with its defaults: there is no tuning of them all yet"
            show(progress.Note(text=f"every method is run {tuned}"))
        if order.name == "fig9" and (left_out := [name for name in _BACKBONES if name not in plan.backbones]):
            show(progress.Note(text=f"left out, since their weights are out of reach: {', '.join(left_out)}"))
        super().__init__(GRIDS[order.name](plan), self._store.cells, order.store, order.workers, order.device)

    def _plan(self, weights: Mapping[str, str]) -> Plan:
        order, preset = self._order, PRESETS[self._order.preset]
        fig9 = _BACKBONES if order.name == "fig9" else ()  # whether weights can be downloaded takes a while to say
        return Plan(
            preset=preset._replace(
                size=order.size or preset.size, rounds=order.rounds or preset.rounds, seeds=order.seeds or preset.seeds
            ),
            images=self._bench.images,
            model=order.model,
            encoder=self._bench.encoder,
            backbones=tuple(name for name in fig9 if _within_reach(name, weights[name])),
            training=suited_training(weights[order.model]),
            tuned={},
            torch=TORCH,
            device=order.device,
        )

    def _tuned(self, plan: Plan) -> dict[str, tuning.Trial]:
        def suits(cell: Cell) -> bool:
            same = (cell.model, cell.size) == (plan.model, plan.preset.size)
            return same and cell.weights == plan.encoder(plan.model, cell.seed)

        return tuning.choose(plan.preset.methods, plan.training, self._store.finished().values(), suits)

    def missing(self) -> list[Cell]:
        """What is not finished, or has no features in two dimensions where they are wanted."""
        there = set(self.finished())
        if self._embeds:
            there &= self._store.embeddings().keys()
        return [cell for cell in self.cells if cell.key not in there]

    def material(self, cells: Iterable[Cell]) -> Material:
        """What these cells of it need; images are decoded now."""
        return self._bench.material(cells)._replace(embed=self._embeds)

    def _task(self) -> tuple[Callable[[Cell, Material], Done], Material]:
        return run_cell, self.material(self.missing())

    def _spread(self, work: Callable[[Cell, Any], Any], cells: Sequence[Cell], material: Any) -> Iterator[Any]:
        ray = self._order.ray
        return over_cluster(ray, work, cells, material) if ray else super()._spread(work, cells, material)

    def _keep(self, done: Done) -> Finished:
        self._store.add(*done)
        return done.finished

    def _told(self, cell: Cell) -> str:
        return describe(cell)

    def _figures(self, finished: Finished) -> dict[str, float | None]:
        return {"accuracy": finished.mean("accuracy")}

    def _work(self, cell: Cell) -> Work:
        return (cell.model, cell.size), float(cell.rounds * cell.setting.nodes * cell.setting.samples)

    def tell(self, console: Console) -> list[Path]:
        """Print its tables, draw its figures, and return the files that it has written.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        name, folder, there = self._order.name, self.folder, self.finished()
        finished = [there[cell.key] for cell in self.cells if cell.key in there]
        tables.show(name, finished, folder, console)
        embeddings = [each for found in finished for each in self._store.embeddings().get(found.key, [])]
        return [folder / f"{name}.md", *figures.draw(name, finished, folder, embeddings)]


def describe(cell: Cell) -> str:
    """A cell in words."""
    setting = cell.setting
    return f"{cell.method}, {setting.dataset} {setting.partition} {setting.samples}, {cell.model}, seed {cell.seed}"


def _check_data(data: Mapping[str, Path]) -> None:
    if not data:
        raise UsageError("an experiment needs images", f"pass --data NAME=FOLDER, NAME of {', '.join(DATASETS)}")
    for name in data:
        if name not in DATASETS:
            raise UsageError(f"there is no data set {name!r}", nearest(name, DATASETS))


def _check_device(order: Order) -> None:
    check_device(order.device)
    if order.ray and order.device != "cpu":
        raise UsageError("workers of a Ray cluster train on its processors", "leave out --device or --ray")


def _weights(order: Order) -> dict[str, str]:
    """Initial weights by model; those that are not given are of the same kind."""
    given = {}
    for text in order.weights:
        model, equals, weights = text.rpartition("=")
        if equals and model not in FEATURES:
            raise UsageError(f"there is no model {model!r}", nearest(model, FEATURES))
        given[model or order.model] = weights
    main = given.get(order.model) or suited_weights(order.model)
    others = main if main in ("none", "surface", "imagenet") else "imagenet"
    return {**dict.fromkeys(FEATURES, others), order.model: main, **given}


def _within_reach(model: str, weights: str) -> bool:
    if weights == "surface":
        return model in SURFACE
    return weights != "imagenet" or backbones.within_reach(model)
