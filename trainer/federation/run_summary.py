"""Results of a run: a table for people, JSON for machines."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker_config.protocol.errors import replace_unprintable
from broker_config.protocol.messages import Spec
from edge.bundle.comparison import Comparison
from edge.terminal.formatting import format_names, pluralize
from trainer.data.image_groups import UNGROUPED
from trainer.training.personal_model import ModelMetadata


class FirstModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a node had of the federation's first sums, before anybody trained."""

    seconds: float  # since the processes were started
    # as a line judges, on images that it has not seen; None where none can judge
    accuracy: float | None
    low: float | None  # 95 % interval
    high: float | None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one node's deployed model. Accuracies are from 0 to 1, on held-out images."""

    name: str
    classes: list[str]  # of its own images
    images: int  # that trained
    test_images: int
    is_grouped: bool = True  # whether any images that judge are known to belong together
    accuracy: float  # of what is deployed, as a line judges, on its own images
    accuracy_low: float  # 95 % interval
    accuracy_high: float
    f1: float  # macro, among its own classes
    accuracy_all: float  # among all classes, on images of all nodes where they are at hand
    accuracy_others: float | None = None  # likewise, on images of classes that it has none of
    onnx_accuracy: float | None = None  # the exported bundle, as `accuracy`
    comparison: Comparison | None = None  # with training alone
    first: FirstModel | None = None  # where a demo has watched it being made
    history: list[dict[str, float]] = []

    @staticmethod
    def from_metadata(metadata: ModelMetadata) -> "NodeReport":
        """The results that a node left beside its personal model."""
        metrics = metadata.metrics
        test_images = 0 if metrics["cross_validated"] else int(metrics["images"])
        return NodeReport(
            name=metadata.node,
            classes=list(metadata.trained),
            images=sum(metadata.trained.values()),
            test_images=test_images,
            is_grouped=metrics.get("groups") != metrics["images"],
            accuracy=metrics["accuracy"],
            accuracy_low=metrics["accuracy_low"],
            accuracy_high=metrics["accuracy_high"],
            f1=metrics["f1"],
            comparison=metadata.comparison,
            history=list(metadata.history),
            accuracy_all=metrics["accuracy_all"],
            accuracy_others=metrics.get("accuracy_others"),
        )


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of the daemon to held-out images over HTTP."""

    node: str
    images: int
    agreeing: int  # with the same bundle, called directly
    accuracy: float
    milliseconds_p50: float  # of a request, as its sender measures it


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a whole run."""

    method: str
    options: dict[str, bool | int | float | str]
    model: str
    weights: str = ""  # as requested; empty where only the coordinator knows
    data: str = ""  # folder of the images, if they were partitioned among the nodes
    size: int
    training: dict[str, bool | int | float | str]
    rounds: int
    seed: int
    nodes: list[NodeReport]
    bytes_up: int = 0  # nodes -> coordinator
    bytes_down: int = 0  # coordinator -> broker, which hands a copy to every node
    model_bytes: int = 0  # of the largest contribution
    seconds: float = 0.0
    engine: str = "plain"  # that trained the nodes: plain or batched
    device: str = "cpu"
    aggregate: str = "mean"  # the rule, and the number of liars that it allows for
    liars: int = 0
    serving: Serving | None = None

    @staticmethod
    def from_spec(
        source: Spec | ModelMetadata, nodes: list[NodeReport], **more: Any
    ) -> "RunReport":
        """The report of the run that a spec describes, or that left a personal model."""
        if isinstance(source, Spec):
            more = {"aggregate": source.aggregation.rule, "liars": source.aggregation.liars, **more}
        return RunReport(
            method=source.method,
            options=source.options,
            model=source.model,
            size=source.preprocessing.size,
            training=msgspec.to_builtins(source.training),
            rounds=source.rounds,
            seed=source.seed,
            nodes=nodes,
            **more,
        )

    def columns(self) -> "list[Column]":
        """The columns of accuracies that at least one node has."""
        columns = []
        for title, value in _COLUMNS:
            columns.append(Column(title, [value(node) for node in self.nodes]))
        kept = []
        for column in columns:
            if any(value is not None for value in column.values):
                kept.append(column)
        return kept

    @property
    def ungrouped(self) -> str:
        """A sentence on nodes of whose images none are known to belong together; or empty."""
        names = [node.name for node in self.nodes if not node.is_grouped]
        return f"{format_names(names)}: {UNGROUPED}" if names else ""

    def mean(self, field: str) -> float:
        """Mean of a field over the nodes."""
        return float(sum(getattr(node, field) for node in self.nodes) / len(self.nodes))

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.format(msgspec.json.encode(self))


class Column(NamedTuple):
    """A column of the nodes' table."""

    title: str
    values: list[float | None]  # of each node

    @property
    def mean(self) -> float:
        """Of the nodes that have a value, of which there are some."""
        known = [value for value in self.values if value is not None]
        return sum(known) / len(known)


def _compared(model: str) -> Callable[[NodeReport], float | None]:
    """The accuracy of one of the models that a node has compared, if it has."""

    def accuracy(node: NodeReport) -> float | None:
        if node.comparison is None:
            return None
        found: float = getattr(node.comparison, model).accuracy
        return found

    return accuracy


_COLUMNS: tuple[tuple[str, Callable[[NodeReport], float | None]], ...] = (
    ("alone", _compared("alone")),
    ("together", _compared("together")),
    ("mixed", _compared("mixed")),
    ("accuracy", lambda node: node.accuracy),
    ("all classes", lambda node: node.accuracy_all),
    ("others' classes", lambda node: node.accuracy_others),
    ("ONNX", lambda node: node.onnx_accuracy),
)


_ON_THE_PAGE_ONLY = ("mixed", "ONNX")  # for which 80 columns have no room


def print_table(report: RunReport, console: Console) -> None:
    """Print a row for each node, the mean, a sentence on what joining was worth, and warnings."""
    columns = [column for column in report.columns() if column.title not in _ON_THE_PAGE_ONLY]
    title = (
        f"{report.method}, {report.model}, {pluralize(report.rounds, 'round')}, accuracy % on "
        "unseen images"
    )
    table = Table(title=Text(replace_unprintable(title)))
    for heading in ("node", "own", "images"):
        table.add_column(heading)
    for column in columns:
        table.add_column(column.title, justify="right")
    classes = set(chain.from_iterable(node.classes for node in report.nodes))
    for number, node in enumerate(report.nodes):
        cells = [_percent(column.values[number]) for column in columns]
        images = f"{node.images} + {node.test_images}"
        table.add_row(
            Text(replace_unprintable(node.name)),
            f"{len(node.classes)} of {len(classes)}",
            images,
            *cells,
        )
    table.add_section()
    table.add_row("mean", "", "", *(_percent(column.mean) for column in columns))
    console.print(table)
    if sentence := describe_joining(report.nodes):
        console.print(sentence, highlight=False)
    if note := report.ungrouped:
        console.print(Text(replace_unprintable(note)), soft_wrap=True)
    for node in report.nodes:
        warnings = node.comparison.warnings() if node.comparison else ()
        for warning in warnings:
            console.print(Text(f"{replace_unprintable(node.name)}: {warning}"))


def describe_joining(nodes: Sequence[NodeReport]) -> str:
    """Whether joining was worth it to the nodes together, as a sentence;
    empty where nothing was compared.
    """
    compared = [node.comparison for node in nodes if node.comparison]
    if not compared:
        return ""
    gains = list_gains(compared)
    signs = []
    for sign in (1, -1):
        signs.append(sum(sign * gain > 0 for gain in gains))
    better, worse = signs
    mean = 100 * sum(gains) / len(gains)
    choices = Counter(each.deployed for each in compared)
    deployed = ", ".join(f"{name} at {count}" for name, count in choices.most_common())
    others = [node.accuracy_others for node in nodes if node.accuracy_others is not None]
    right = f"{100 * sum(others) / len(others):.0f} % right" if others else ""
    learnt = (
        f"; {right} on classes that a plant has no image of, if all weigh the same"
        if others
        else ""
    )
    return (
        f"own classes, as a line judges: {mean:+.1f} points over training alone, {better} of "
        f"{len(compared)} better, {worse} worse (deployed: {deployed}){learnt}"
        f"{_describe_training(compared)}"
    )


def list_gains(compared: Sequence[Comparison]) -> list[float]:
    """Return what joining was worth to each node: the difference of the accuracies shown."""
    return [each.chosen.accuracy - each.alone.accuracy for each in compared]


def _describe_training(compared: Sequence[Comparison]) -> str:
    """Whether training paid over the first sums, as the end of a sentence;
    empty where nothing was trained after sums.
    """
    gains = [each.training for each in compared if each.training]
    if not gains:
        return ""
    shown = sum(each.is_shown for each in gains)
    judged = [100 * (each.trained - each.first) for each in gains if each.images]
    mean = f", {sum(judged) / len(judged):+.1f} points in the mean" if judged else ""
    return f"; training beats the first sums at {shown} of {len(gains)} plants{mean}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"
