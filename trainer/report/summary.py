"""Results of a run: a table for people, JSON for machines."""

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker_config.protocol.errors import replace_unprintable
from broker_config.protocol.messages import Spec
from trainer.training.personal_model import ModelMetadata


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one node. Accuracies are of the last round, on held-out images, from 0 to 1."""

    name: str
    classes: list[str]  # of its own images
    images: int  # that trained
    test_images: int
    accuracy: float
    accuracy_low: float  # 95 % interval
    accuracy_high: float
    f1: float  # macro, over the node's own classes
    local_accuracy: float | None = None  # the same training without federation
    onnx_accuracy: float | None = None  # the exported bundle on the same images
    history: list[dict[str, float]] = []

    @staticmethod
    def from_metadata(metadata: ModelMetadata, **more: float) -> "NodeReport":
        """The results that a node left beside its personal model."""
        return NodeReport(
            name=metadata.node,
            classes=list(metadata.trained),
            images=sum(metadata.trained.values()),
            test_images=0 if metadata.metrics["cross_validated"] else int(metadata.metrics["images"]),
            accuracy=metadata.metrics["accuracy"],
            accuracy_low=metadata.metrics["accuracy_low"],
            accuracy_high=metadata.metrics["accuracy_high"],
            f1=metadata.metrics["f1"],
            history=list(metadata.history),
            **more,
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
    model_bytes: int = 0  # of one contribution
    seconds: float = 0.0
    engine: str = "plain"  # that trained the nodes: plain or batched
    device: str = "cpu"
    aggregate: str = "mean"  # the rule, and the number of liars that it allows for
    liars: int = 0
    serving: Serving | None = None

    @staticmethod
    def from_spec(source: Spec | ModelMetadata, nodes: list[NodeReport], **more: Any) -> "RunReport":
        """The report of the run that a spec describes, or that left a personal model."""
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

    def mean(self, field: str) -> float | None:
        """Mean of a field over the nodes, None if one lacks it."""
        values = [getattr(node, field) for node in self.nodes]
        return None if None in values else sum(values) / len(values)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.format(msgspec.json.encode(self))


_WIDE = 70  # a terminal of so many columns has room for class names
_COLUMNS = (
    ("local only", "local_accuracy"),
    ("federated", "accuracy"),
    ("ONNX", "onnx_accuracy"),
)


def print_table(report: RunReport, console: Console) -> None:
    """Print a row for each node, and the mean."""
    columns = [(title, field) for title, field in _COLUMNS if report.mean(field) is not None]
    title = f"{report.method}, {report.model}, {report.rounds} rounds, accuracy % on held-out images"
    table = Table(title=Text(replace_unprintable(title)))
    wide = console.width >= _WIDE
    for title in ("node", "classes", "images") if wide else ("node", "images"):
        table.add_column(title)
    for title, _ in columns:
        table.add_column(title, justify="right")
    for node in report.nodes:
        cells = [_percent(getattr(node, field)) for _, field in columns]
        images = f"{node.images} + {node.test_images}"
        names = [node.name, *([", ".join(node.classes)] if wide else [])]
        table.add_row(*(Text(replace_unprintable(name)) for name in names), images, *cells)
    table.add_section()
    table.add_row("mean", *([""] if wide else []), "", *(_percent(report.mean(field)) for _, field in columns))
    console.print(table)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"
