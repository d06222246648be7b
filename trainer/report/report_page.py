"""Report page of a run: `report.html`, one file that needs nothing but a browser."""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup
from msgspec.structs import asdict

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Training
from broker_config.storage.disk import writing
from edge.inference.part_decision import no_defect_class
from edge.inference.tiling import View
from edge.terminal.formatting import format_bytes
from edge.uncertainty.performance import Labelled, measure
from trainer.federation.run_summary import describe_joining, list_gains
from trainer.methods import make
from trainer.methods.base import EPSILON, Method, Metric
from trainer.progress import Note, Report, Step
from trainer.progress.timeline import Activity
from trainer.report import charts
from trainer.report.model_examination import Examination, examine
from trainer.report.page_template import page_environment
from trainer.report.run_files import Node, Run, load_run
from trainer.training.personal_model import HeldOutPrediction, format_spent

_MAX_EXAMPLE_NODES = 8  # nodes whose images are shown
_HERE = resources.files("trainer.report")


def write(folder: Path, out: Path, report: Report) -> Path:
    """Write the page of a run to `out`, and return its path.

    Args:
        folder: the one that a demo, a simulation, a node or a coordinator left.
        out: an HTML file.
        report: receives the progress; examining images takes seconds.

    Raises:
        UsageError: `folder` has no run, or is damaged.
    """
    run = load_run(folder)
    if run.kind == "node":
        metadata = run.nodes[0].metadata
        model = (
            f"run {metadata.run} of federation {metadata.federation}, finished "
            f"{_format_time(metadata.created)}"
        )
        report(Note(text=f"report: about {model}"))
        if run.unfinished:
            report(Note(text=f"the node took part in run {run.unfinished} later; it left no model"))
    examined = {}
    for number, node in enumerate(run.nodes):
        if node.predictions:
            position = f"{number + 1} of {len(run.nodes)}"
            report(
                Step(what=f"report: examining {node.report.name}'s held-out images ({position})")
            )
            examined[node.report.name] = examine(node, examples=number < _MAX_EXAMPLE_NODES)
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(run, examined), encoding="utf-8")
    return out


def render(run: Run, examined: dict[str, Examination | None]) -> str:
    """The page as HTML. `examined` is by node; None where no image could be examined."""
    environment = page_environment("trainer.report")
    environment.filters |= {"size": format_bytes, "duration": format_duration, "time": _format_time}
    environment.globals |= {
        "node_class": charts.node_class,
        "label_class": charts.label_class,
        "marker_id": charts.marker_id,
    }
    script = _HERE.joinpath("page.js").read_text("utf-8")
    examinations = {name: each for name, each in examined.items() if each is not None}
    compared = [node for node in run.report.nodes if node.comparison]
    metadata = run.nodes[0].metadata if run.nodes else None
    return environment.get_template("page.html").render(
        run=run,
        report=run.report,
        metadata=metadata,
        numbers={node.report.name: number for number, node in enumerate(run.nodes)},
        style=Markup(_HERE.joinpath("page.css").read_text("utf-8")),  # noqa: S704  (our own files)
        script=Markup(script),  # noqa: S704
        # Only this script may run, whatever else should ever get into the page.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        charts=_charts(run),
        compared=compared,
        gain=100
        * sum(list_gains([node.comparison for node in compared if node.comparison]))
        / max(1, len(compared)),
        joining=describe_joining(run.report.nodes),
        intervals=[_interval_bar(number, node) for number, node in enumerate(run.nodes)],
        last=_last_values(run),
        matrices=_matrices(run),
        projections=_projections(run, examinations),
        examples={name: each for name, each in examinations.items() if each.correct or each.wrong},
        images_shown=sum(len(each.correct) + len(each.wrong) for each in examinations.values()),
        time=_time(run),
        privacy=[
            (
                node.report.name,
                format_spent(node.metadata.privacy),
                asdict(node.metadata.privacy.settings),
            )
            for node in run.nodes
            if node.metadata.privacy
        ],
    )


# Line charts


class Chart(NamedTuple):
    """A chart with its caption."""

    symbol: str
    subscript: str
    title: str
    meaning: str
    figure: Markup


_ACCURACY = Metric("accuracy", "accuracy", "Among the node's own classes, on held-out images, %.")


def _metrics(run: Run) -> tuple[Metric, ...]:
    """What nodes of the run report, in the order of the page."""
    method = _method(run)
    metrics = method.metrics if method else ()
    return (*metrics, EPSILON, _ACCURACY)


def _method(run: Run) -> Method | None:
    """The run's method; None where this version has none of that name, or other options."""
    try:
        return make(run.report.method, Training(), run.report.options)
    except UsageError:
        return None


def _charts(run: Run) -> list[Chart]:
    if run.kind == "coordinator":
        return [] if run.masked else [_weights_chart(run)]
    found = []
    for metric in _metrics(run):
        series = []
        for number, node in enumerate(run.nodes):
            if points := [
                (line["round"], line[metric.key])
                for line in node.report.history
                if metric.key in line
            ]:
                series.append(charts.Series(node.report.name, number, points))
        if series:
            reference = charts.ReferenceLine(*metric.level) if metric.level else None
            figure = charts.line_chart(
                metric.title,
                series,
                run.report.rounds,
                reference=reference,
                percent=metric.key == _ACCURACY.key,
            )
            symbol, subscript = metric.key.split("_") if "_" in metric.key else ("", "")
            found.append(Chart(symbol, subscript, metric.title, metric.meaning, figure))
    return found


def _weights_chart(run: Run) -> Chart:
    names = sorted(set(chain.from_iterable(line.weights for line in run.rounds)))
    series = []
    for number, name in enumerate(names):
        series.append(
            charts.Series(
                name,
                number,
                [
                    (float(line.round), line.weights[name])
                    for line in run.rounds
                    if name in line.weights
                ],
            )
        )
    figure = charts.line_chart("weight of the contribution", series, run.report.rounds)
    method = _method(run)
    meaning = (
        f"As each node measured it: {method.weight_meaning}."
        if method
        else "As each node measured it."
    )
    return Chart("", "", "weight of the contribution", meaning, figure)


def _last_values(run: Run) -> tuple[list[str], list[tuple[str, dict[str, float]]]]:
    """Names of the metrics, and each node's last value of each: the curves' ends as numbers."""
    last: list[tuple[str, dict[str, float]]] = []
    for node in run.nodes:
        values: dict[str, float] = {}
        for line in node.report.history:
            values |= line
        last.append((node.report.name, values))
    keys = [metric.key for metric in _metrics(run)]
    metrics = []
    for metric in keys:
        if any(metric in values for _, values in last):
            metrics.append(metric)
    return metrics, last


def _interval_bar(number: int, node: Node) -> Markup:
    report = node.report
    alone = report.comparison.alone.accuracy if report.comparison else None
    return charts.interval_bar(
        number, report.accuracy_low, report.accuracy, report.accuracy_high, alone
    )


# Verdicts


class Matrix(NamedTuple):
    """A confusion matrix, `counts[label][prediction]`, with only the classes that occur,
    and its errors in words.
    """

    name: str
    rows: list[str]
    columns: list[str]
    counts: list[list[int]]
    errors: str


def _matrices(run: Run) -> list[Matrix]:
    """All nodes together, then each of them."""
    per_node = [(node.report.name, node.predictions) for node in run.nodes if node.predictions]
    together = (
        [
            (
                "all nodes together",
                tuple(chain.from_iterable(predictions for _, predictions in per_node)),
            )
        ]
        if len(per_node) > 1
        else []
    )
    return [_matrix(name, predictions, run.classes) for name, predictions in (*together, *per_node)]


def _matrix(name: str, predictions: Sequence[HeldOutPrediction], classes: Sequence[str]) -> Matrix:
    counts = Counter((prediction.label, prediction.verdict) for prediction in predictions)
    rows = []
    for each in classes:
        if any(label == each for label, _ in counts):
            rows.append(each)
    columns = []
    for each in classes:
        if each in rows or any(prediction == each for _, prediction in counts):
            columns.append(each)
    no_defect = no_defect_class(View(), classes)
    verdicts = [
        Labelled(each.label, each.verdict, each.verdict != no_defect, doubted=False)
        for each in predictions
    ]
    errors = measure(verdicts, len(classes), no_defect).errors
    cells = []
    for row in rows:
        cells.append([counts[row, column] for column in columns])
    return Matrix(name, rows, columns, cells, errors)


def _projections(run: Run, examined: dict[str, Examination]) -> dict[str, Markup]:
    """A t-SNE plot of each node's held-out images."""
    projections: dict[str, Markup] = {}
    for name, examination in examined.items():
        if len(examination.projection):
            projections[name] = charts.scatter_plot(
                f"t-SNE of {len(examination.predictions)} held-out images of {name}",
                [
                    charts.Point(
                        x,
                        y,
                        run.classes.index(prediction.label),
                        prediction.label == prediction.verdict,
                        f"{prediction.label}, classified as {prediction.verdict} "
                        f"({prediction.confidence:.0%})",
                    )
                    for (x, y), prediction in zip(
                        examination.projection, examination.predictions, strict=True
                    )
                ],
            )
    return projections


# Time


class Time(NamedTuple):
    """Parts of the timeline section."""

    whole: Markup
    detail: Markup
    medians: list[tuple[str, dict[Activity, float]]]
    seconds: float


def _time(run: Run) -> Time | None:
    lanes = [
        charts.Lane(node.report.name, n, node.spans)
        for n, node in enumerate(run.nodes)
        if node.spans
    ]
    if not lanes:
        return None
    begins = []
    for lane in lanes:
        for span in lane.spans:
            begins.append(span.begin)
    begin = min(begins)
    ends = []
    for lane in lanes:
        for span in lane.spans:
            ends.append(span.end)
    end = max(ends)
    return Time(
        charts.timeline_chart(lanes, begin, end, "What each node did over the whole run"),
        charts.timeline_chart(
            lanes, *charts.middle_rounds(lanes), "What each node did in a few rounds"
        ),
        [(lane.name, charts.median_durations(lane)) for lane in lanes],
        end - begin,
    )


# Formatting


def format_duration(seconds: float) -> str:
    """Seconds in a fitting unit, rounded."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _format_time(created: str) -> str:
    time = datetime.fromisoformat(created)
    return f"{time.day} {time:%B %Y, %H:%M} UTC"
