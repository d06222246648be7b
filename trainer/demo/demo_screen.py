"""The demo's outcome on one screen: a row for each plant, then a line for each thing to see."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker_config.protocol.errors import replace_unprintable
from edge.bundle.comparison import Comparison, TrainingGain
from edge.terminal.formatting import pluralize
from edge.uncertainty.performance import wilson_interval
from trainer.federation.run_summary import NodeReport, RunReport, list_gains

# Of the columns after the name; those that no node has anything for are left out.
_TITLES = ("images", "alone", "first model", "training added", "deployed")


def print_outcome(report: RunReport, console: Console) -> None:
    """Print what a run of the demo has shown, in 80 columns."""
    console.print(_table(report))
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(ratio=1)
    for name, sentence in _sentences(report):
        lines.add_row(name, Text(replace_unprintable(sentence)))
    console.print(lines, highlight=False)
    for node in report.nodes:
        warnings = node.comparison.warnings() if node.comparison else ()
        for warning in warnings:
            console.print(Text(f"{replace_unprintable(node.name)}: {warning}"))


# The table


def _table(report: RunReport) -> Table:
    rounds = pluralize(report.rounds, "round")
    title = f"{report.method}, {report.model}, {rounds}: % right of held-out images of own classes"
    table = Table(title=Text(replace_unprintable(title)))
    table.add_column("node")
    rows = [_cells(node) for node in report.nodes]
    kept = []
    for column, title in enumerate(_TITLES):
        if any(row[column] for row in rows):
            kept.append(column)
            table.add_column(title, justify="right")
    for node, row in zip(report.nodes, rows, strict=True):
        cells = [row[column] for column in kept]
        table.add_row(Text(replace_unprintable(node.name)), *cells)
    return table


def _cells(node: NodeReport) -> tuple[str, ...]:
    """Return a node's cell in each column of _TITLES."""
    alone = ""
    first = ""
    added = ""
    deployed = f"{100 * node.accuracy:.1f}"
    if node.comparison:
        alone = f"{100 * node.comparison.alone.accuracy:.1f}"
    if node.first and node.first.accuracy is not None:
        interval = _format_interval(node.first.low or 0, node.first.high or 1, "")
        first = f"{100 * node.first.accuracy:.1f} {interval}"
    gain = node.comparison.training if node.comparison else None
    if gain:
        deployed = f"{deployed} {_name_model(gain)}"
    if gain and gain.images:
        interval = _format_interval(gain.low, gain.high, "+")
        added = f"{100 * (gain.trained - gain.first):+.1f} {interval}"
    return f"{node.images} + {node.test_images}", alone, first, added, deployed


def _name_model(gain: TrainingGain) -> str:
    return "trained" if gain.is_shown else "first"


def _format_interval(low: float, high: float, sign: str) -> str:
    return f"({100 * low:{sign}.0f} to {100 * high:{sign}.0f})"


# The sentences


def _sentences(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield each thing to see with its name."""
    compared = [node.comparison for node in report.nodes if node.comparison]
    if first := _describe_first(report.nodes):
        yield "first model", first
    if trained := _describe_training(compared):
        yield "training", trained
    if compared:
        yield "joining", _describe_joining(compared)
    yield "all classes", _describe_all_classes(report.nodes)
    served = report.serving
    if served:
        right = round(served.accuracy * served.images)
        yield (
            "daemon",
            (
                f"{served.node}'s bundle, asked over HTTP: {right} of {served.images} held-out "
                f"images right ({100 * served.accuracy:.1f} %), {served.milliseconds_p50:.1f} ms "
                "each"
            ),
        )


def _describe_first(nodes: Sequence[NodeReport]) -> str:
    """Return when all nodes had a model, and how good they were; empty if not all had one."""
    seconds = []
    right = 0.0
    images = 0
    for node in nodes:
        if node.first is None or node.first.accuracy is None or node.comparison is None:
            return ""
        seconds.append(node.first.seconds)
        right += node.first.accuracy * node.comparison.images
        images += node.comparison.images
    low, high = wilson_interval(right, images)
    return (
        f"{max(seconds):.0f} s after the start, of one message from each plant: "
        f"{100 * right / images:.1f} % {_format_interval(low, high, '')} of {images} images right"
    )


def _describe_training(compared: Sequence[Comparison]) -> str:
    """Return what training added and which model is deployed; empty if nothing was trained so."""
    gains = [each.training for each in compared if each.training]
    judged = [each for each in gains if each.images]
    if not judged:
        return ""
    mean = 100 * sum(each.trained - each.first for each in judged) / len(judged)
    models = Counter(_name_model(each) for each in gains)
    deployed = ", ".join(f"{name} at {count}" for name, count in models.most_common())
    return (
        f"{mean:+.1f} points in the mean, shown at {models['trained']} of "
        f"{pluralize(len(gains), 'plant')}; deployed: {deployed}"
    )


def _describe_joining(compared: Sequence[Comparison]) -> str:
    """Return what the plants reach alone, and with what they deploy."""
    gains = list_gains(compared)
    alone = 100 * sum(each.alone.accuracy for each in compared) / len(compared)
    better = sum(gain > 0 for gain in gains)
    worse = sum(gain < 0 for gain in gains)
    choices = Counter(each.deployed for each in compared)
    deployed = ", ".join(f"{name} at {count}" for name, count in choices.most_common())
    mean = 100 * sum(gains) / len(gains)
    return (
        f"{alone:.1f} % alone, {alone + mean:.1f} % as deployed ({deployed}): {mean:+.1f} points, "
        f"{better} of {pluralize(len(gains), 'plant')} better, {worse} worse"
    )


def _describe_all_classes(nodes: Sequence[NodeReport]) -> str:
    """Return how the nodes do on images of classes that they never had, and of all."""
    everything = 100 * sum(node.accuracy_all for node in nodes) / len(nodes)
    others = [node.accuracy_others for node in nodes if node.accuracy_others is not None]
    told = ""
    if others:
        share = 100 * sum(others) / len(others)
        told = f"; {share:.1f} % on those of classes that a plant has none of"
    return f"{everything:.1f} % right on images of all plants, any class allowed{told}"
