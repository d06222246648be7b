"""A run as one page: `report.html`, which needs nothing but a browser."""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from broker_config.storage.disk import writing
from edge.terminal.formatting import format_bytes
from trainer.progress import Note, Report, Step
from trainer.progress.timeline import Activity
from trainer.report import charts as figures
from trainer.report.model_examination import Examined, examine
from trainer.report.run_files import Node, Run, gather
from trainer.training.personal_model import Verdict

_PICTURED = 8  # nodes whose images are shown
_HERE = resources.files("trainer.report")


def write(run: Path, out: Path, show: Report) -> Path:
    """Write the page of a run to `out`, and return it.

    Args:
        run: the folder that a demo, a simulation, a node or a coordinator left.
        out: an HTML file.
        show: is told of each step: looking at images takes seconds.

    Raises:
        UsageError: `run` is no run's folder, or is damaged.
    """
    gathered = gather(run)
    if gathered.kind == "node":
        facts = gathered.nodes[0].facts
        model = f"run {facts.run} of federation {facts.federation}, finished {_moment(facts.created)}"
        show(Note(text=f"report: about {model}"))
        if gathered.unfinished:
            show(Note(text=f"the node took part in run {gathered.unfinished} later; it has left no model"))
    examined = {}
    for number, node in enumerate(gathered.nodes):
        if node.verdicts:
            place = f"{number + 1} of {len(gathered.nodes)}"
            show(Step(what=f"report: looking at {node.figures.name}'s held-out images ({place})"))
            examined[node.figures.name] = examine(node, pictures=number < _PICTURED)
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(gathered, examined), encoding="utf-8")
    return out


def render(run: Run, examined: dict[str, Examined | None]) -> str:
    """The page as HTML. `examined` is by node; None where no image could be looked at."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _HERE.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": format_bytes, "duration": duration, "moment": _moment}
    environment.globals |= {
        "node_class": figures.node_class,
        "class_class": figures.class_class,
        "shape": figures.shape,
    }
    script = _HERE.joinpath("page.js").read_text("utf-8")
    found = {name: each for name, each in examined.items() if each is not None}
    return environment.get_template("page.html").render(
        run=run,
        report=run.report,
        facts=run.nodes[0].facts if run.nodes else None,
        numbers={node.figures.name: number for number, node in enumerate(run.nodes)},
        style=Markup(_HERE.joinpath("page.css").read_text("utf-8")),  # noqa: S704  (our own files)
        script=Markup(script),  # noqa: S704
        # Only this script may run, whatever else should ever get into the page.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        charts=_charts(run),
        intervals=[_interval(number, node) for number, node in enumerate(run.nodes)],
        last=_last_round(run),
        matrices=_matrices(run),
        maps=_maps(run, found),
        pictures={name: each for name, each in found.items() if each.right or each.wrong},
        images_shown=sum(len(each.right) + len(each.wrong) for each in found.values()),
        time=_time(run),
    )


# Curves


class Chart(NamedTuple):
    """A figure with its words."""

    symbol: str
    subscript: str
    title: str
    meaning: str
    figure: Markup


_CURVES = (
    ("L_D", "L", "D", "discrimination loss", "At ln 2 the discriminator cannot tell local features from global ones."),
    ("A_k", "A", "k", "fusion weight", "The share of the received encoder's features in the personal model."),
    ("L_C", "L", "C", "classification loss", "Stage 1, on the node's training images."),
    ("L_T", "L", "T", "triplet loss", "Images with patches of other plants; 0 while there are none."),
    ("L_F", "L", "F", "fusion loss", "Stage 2, on the node's training images."),
    ("accuracy", "", "", "accuracy", "On held-out images, %."),
)


def _charts(run: Run) -> list[Chart]:
    if run.kind == "coordinator":
        return [_weights_chart(run)]
    charts = []
    for metric, symbol, subscript, title, meaning in _CURVES:
        series = [
            figures.Series(node.figures.name, number, points)
            for number, node in enumerate(run.nodes)
            if (points := [(line["round"], line[metric]) for line in node.figures.history if metric in line])
        ]
        if series:
            rule = figures.Rule(math.log(2), "ln 2") if metric == "L_D" else None
            figure = figures.curves(title, series, run.report.rounds, rule=rule, percent=metric == "accuracy")
            charts.append(Chart(symbol, subscript, title, meaning, figure))
    return charts


def _weights_chart(run: Run) -> Chart:
    names = sorted({node for line in run.rounds for node in line.weights})
    series = [
        figures.Series(
            name, number, [(float(line.round), line.weights[name]) for line in run.rounds if name in line.weights]
        )
        for number, name in enumerate(names)
    ]
    figure = figures.curves("weight of the contribution", series, run.report.rounds)
    return Chart("", "", "weight of the contribution", "As each node measured it: L_D for afedcl.", figure)


def _last_round(run: Run) -> tuple[list[str], list[tuple[str, dict[str, float]]]]:
    """Names of the metrics, and each node's last value of each: the curves' ends as numbers."""
    last: list[tuple[str, dict[str, float]]] = []
    for node in run.nodes:
        values: dict[str, float] = {}
        for line in node.figures.history:
            values |= line
        last.append((node.figures.name, values))
    return [metric for metric, *_ in _CURVES if any(metric in values for _, values in last)], last


def _interval(number: int, node: Node) -> Markup:
    found = node.figures
    return figures.interval(number, found.accuracy_low, found.accuracy, found.accuracy_high, found.local_accuracy)


# Verdicts


class Matrix(NamedTuple):
    """A confusion matrix: `counts[label][verdict]`, with the right share of each row."""

    name: str
    rows: list[str]
    columns: list[str]
    counts: list[list[int]]


def _matrices(run: Run) -> list[Matrix]:
    """All nodes together, then each."""
    judged = [(node.figures.name, node.verdicts) for node in run.nodes if node.verdicts]
    together = [("all nodes together", tuple(v for _, verdicts in judged for v in verdicts))] if len(judged) > 1 else []
    return [_matrix(name, verdicts, run.classes) for name, verdicts in (*together, *judged)]


def _matrix(name: str, verdicts: Sequence[Verdict], classes: Sequence[str]) -> Matrix:
    counts = Counter((verdict.label, verdict.verdict) for verdict in verdicts)
    rows = [each for each in classes if any(label == each for label, _ in counts)]
    columns = [each for each in classes if each in rows or any(verdict == each for _, verdict in counts)]
    return Matrix(name, rows, columns, [[counts[row, column] for column in columns] for row in rows])


def _maps(run: Run, examined: dict[str, Examined]) -> dict[str, Markup]:
    """A t-SNE of each node's held-out images."""
    return {
        name: figures.scatter(
            f"t-SNE of {len(found.verdicts)} held-out images of {name}",
            [
                figures.Point(
                    x, y, run.classes.index(verdict.label), verdict.label == verdict.verdict,
                    f"{verdict.label}, judged {verdict.verdict} ({verdict.confidence:.0%})",
                )
                for (x, y), verdict in zip(found.places, found.verdicts, strict=True)
            ],
        )
        for name, found in examined.items()
        if len(found.places)
    }  # fmt: skip


# Time


class Time(NamedTuple):
    """The timeline's parts."""

    whole: Markup
    detail: Markup
    medians: list[tuple[str, dict[Activity, float]]]
    seconds: float


def _time(run: Run) -> Time | None:
    lanes = [figures.Lane(node.figures.name, n, node.spans) for n, node in enumerate(run.nodes) if node.spans]
    if not lanes:
        return None
    begin = min(span.begin for lane in lanes for span in lane.spans)
    end = max(span.end for lane in lanes for span in lane.spans)
    return Time(
        figures.timeline(lanes, begin, end, "What each node did over the whole run"),
        figures.timeline(lanes, *figures.middle(lanes), "What each node did in a few rounds"),
        [(lane.name, figures.medians(lane)) for lane in lanes],
        end - begin,
    )


# Words


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _moment(created: str) -> str:
    moment = datetime.fromisoformat(created)
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
