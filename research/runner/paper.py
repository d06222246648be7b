"""A paper as the runner sees it: its experiments, the cells of each, how a cell runs,
what its results show.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from broker_config.protocol.errors import UsageError, suggest
from research.runner.cell import Cell, Finished
from research.runner.tables import Table
from trainer import progress
from trainer.federation.simulation import Device
from trainer.models.catalogue import FEATURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

C = TypeVar("C", bound=Cell)
F = TypeVar("F", bound=Finished)


@dataclass(frozen=True, kw_only=True)
class Order:
    """An experiment as a user asks for it. Zeros stand for the preset's."""

    name: str
    preset: str
    data: Mapping[str, Path]
    store: Path
    rounds: int = 0
    seeds: int = 0
    workers: int = 0  # 0 = as suits the device
    ray: str = ""  # address of a Ray cluster; empty = this machine's processes
    device: Device = "cpu"


O = TypeVar("O", bound=Order)  # noqa: E741


class Report(NamedTuple):
    """Tables and a figure."""

    paragraphs: Sequence[str]  # above the tables
    tables: Sequence[Table]
    # a figure and its caption; None if there is none
    draw: "Callable[[], tuple[Figure, str]] | None" = None

    def markdown(self, title: str) -> str:
        """All but the figure."""
        tables = (f"## {table.title}\n\n{table.markdown()}" for table in self.tables)
        return "\n\n".join([f"# {title}", *self.paragraphs, *tables]) + "\n"


class Grid(NamedTuple, Generic[C, F]):
    """The cells of an experiment."""

    cells: list[C]  # each once
    # what some of them need, free of paths: it is sent to other processes
    inputs: Callable[[Collection[C]], Any]
    report: Callable[[Mapping[str, F]], Report]  # of what is finished, by key


Work = tuple[Hashable, float]
"""A kind of work, and how much of it."""


@dataclass(frozen=True)
class Paper(Generic[O, C, F]):
    """What the runner is given by a paper."""

    titles: Mapping[str, str]  # of its experiments, by name
    data: Collection[str]  # names of its data sets
    finished: type[F]
    # from an order and all that is finished
    plan: Callable[[O, Iterable[F], progress.Report], Grid[C, F]]
    run_cell: Callable[[C, Any], F]  # a function of a module; it takes inputs
    describe: Callable[[C], str]  # in words
    metrics: Callable[[F], dict[str, float | None]]  # fields of `progress.CellFinished`
    work: Callable[[C], Work]  # from which run times are estimated


def distinct(cells: Iterable[C]) -> list[C]:
    """Each cell once."""
    return list({cell.key: cell for cell in cells}.values())


def parse_weights(texts: Iterable[str]) -> dict[str, str]:
    """Initial weights from `[MODEL=]NAME or FILE`, by model;
    those without one are under the empty name.
    """
    parsed = {}
    for text in texts:
        model, equals, weights = text.rpartition("=")
        if equals and model not in FEATURES:
            raise UsageError(f"there is no model {model!r}", suggest(model, FEATURES))
        parsed[model] = weights
    return parsed
