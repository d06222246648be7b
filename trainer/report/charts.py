"""Charts of the report page: SVG from numbers.

Colours are CSS classes (`n0`.. nodes, `c0`.. classes) of page.css.

Every text goes through `Markup.format`, which escapes it: names come from folders and from the
network.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple, get_args

import numpy as np
from markupsafe import Markup

from edge.terminal.formatting import shorten
from trainer.progress.timeline import Activity, Span

COLOURS = 8  # of nodes and of classes; the ninth repeats the first, with another dash or marker
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_MAX_LABELLED = 8  # lines with labels; beyond that there is only the legend
_MAX_DOTS = 12  # lines of more points have no dots
_LABEL_LENGTH = 10  # characters of a name beside a line


class Series(NamedTuple):
    """A line of a chart: a node's values (y) at rounds (x)."""

    name: str
    number: int  # the node's, for its colour
    points: Sequence[tuple[float, float]]


class ReferenceLine(NamedTuple):
    """A labelled horizontal line at a meaningful value."""

    value: float
    text: str


def _concatenate(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _svg(width: float, height: float, label: str, *content: Markup, attributes: str = "") -> Markup:
    return Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}"{}>{}</svg>').format(
        width, height, label, attributes, _concatenate(content)
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(
        x, y, kind, anchor, words
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<path class="{}" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(
        kind, x1, y1, x2, y2
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high, about `most` or fewer."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    return [
        round(step * k, 10)
        for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


# Line charts


def line_chart(
    title: str,
    series: Sequence[Series],
    rounds: int,
    *,
    reference: ReferenceLine | None = None,
    percent: bool = False,
) -> Markup:
    """A line for each node over rounds 1 to `rounds`, labelled at its end if there are few."""
    width = 300.0
    height = 210.0
    right = 66.0
    top = 10.0
    bottom = 30.0
    factor = 100 if percent else 1
    lines = []
    for line in series:
        lines.append(line._replace(points=[(x, y * factor) for x, y in line.points]))
    series = lines
    heights = []
    for line in series:
        for _, y in line.points:
            heights.append(y)
    reference_value = [reference.value] if reference else []
    ys = heights + reference_value
    first = 1
    last = max(rounds, 2)
    margin = 0.06 * ((max(ys) - min(ys)) or 1.0)
    low = min(ys) - margin
    high = max(ys) + margin
    values = ticks(low, high)
    left = 10 + 6 * max(len(f"{value:g}") for value in values)

    def at_x(x: float) -> float:
        return left + (x - first) / (last - first) * (width - left - right)

    def at_y(y: float) -> float:
        return height - bottom - (y - low) / (high - low) * (height - top - bottom)

    parts = []
    for value in values:
        parts.append(_line(left, at_y(value), width - right, at_y(value), "grid"))
        parts.append(_text(left - 6, at_y(value) + 3.5, f"{value:g}", "tick", "end"))
    for value in ticks(first, last, 7):
        if value == int(value) and value <= rounds:
            parts.append(_text(at_x(value), height - bottom + 14, f"{value:g}", "tick", "middle"))
    parts.append(_text((left + width - right) / 2, height - 3, "round", "tick", "middle"))
    if reference:
        parts.append(
            _line(left, at_y(reference.value), width - right, at_y(reference.value), "rule")
        )
    for line in series:
        path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in line.points)
        drawn = Markup('<path class="line {}" d="M{}"><title>{}</title></path>')
        parts.append(drawn.format(node_class(line.number), path, line.name))
        if len(line.points) <= _MAX_DOTS:
            dot = Markup('<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="2"/>')
            parts += [dot.format(node_class(line.number), at_x(x), at_y(y)) for x, y in line.points]
    if reference:
        parts.append(_text(left + 4, at_y(reference.value) - 4, reference.text, "tick"))
    if len(series) <= _MAX_LABELLED:
        parts += _end_labels(series, at_x(last), at_y, height - bottom)
    ranges = "; ".join(
        f"{line.name} from {line.points[0][1]:.3g} to {line.points[-1][1]:.3g}" for line in series
    )
    unit = " %" if percent else ""
    names = []
    for line in series:
        names.append(
            [
                line.name,
                node_class(line.number),
                {f"{x:g}": float(f"{y:.4g}") for x, y in line.points},
            ]
        )
    readout = {
        "left": left,
        "right": width - right,
        "top": top,
        "bottom": height - bottom,
        "first": first,
        "last": last,
        "unit": unit,
        "lines": names,
    }
    data = Markup(' class="curves" data-readout="{}"').format(
        json.dumps(readout, separators=(",", ":"))
    )
    return _svg(width, height, f"{title} by round: {ranges}", *parts, attributes=data)


def _end_labels(
    series: Sequence[Series], x: float, at_y: Callable[[float], float], bottom: float
) -> list[Markup]:
    """Names at the ends of the lines, moved apart so that they do not overlap,
    each tied to its line.
    """
    wanted = sorted((at_y(line.points[-1][1]), line) for line in series)
    positions = [y for y, _ in wanted]
    for index in range(1, len(positions)):
        positions[index] = max(positions[index], positions[index - 1] + 11)
    positions = [y - max(0.0, positions[-1] - bottom) for y in positions]
    parts = []
    for place, (y, line) in zip(positions, wanted, strict=True):
        parts.append(_line(x + 1, y, x + 9, place, f"tie {node_class(line.number)}"))
        parts.append(
            _text(
                x + 12,
                place + 3.5,
                shorten(line.name, _LABEL_LENGTH),
                f"name {node_class(line.number)}",
            )
        )
    return parts


def node_class(number: int) -> str:
    """CSS classes of a node's colour and dash."""
    return f"n{number % COLOURS} d{(number + number // COLOURS) % 4}"


def label_class(number: int) -> str:
    """CSS class of the colour of the image class at this position."""
    return f"c{number % COLOURS}"


def marker_id(number: int) -> str:
    """Id of the marker of the image class at this position; page.html defines them."""
    return f"shape-{(number + number // COLOURS) % 7}"


# Scatter plots and intervals


class Point(NamedTuple):
    """One image in a scatter plot."""

    x: float
    y: float
    label: int  # its class
    correct: bool  # its prediction
    text: str


def scatter_plot(label: str, points: Sequence[Point]) -> Markup:
    """Images as markers; those classified wrongly have a ring."""
    width = 300.0
    height = 230.0
    margin = 14.0
    positions = np.array([(point.x, point.y) for point in points])
    low = positions.min(0)
    span = np.ptp(positions, 0)
    span[span == 0] = 1.0
    scaled = (positions - low) / span * (width - 2 * margin, height - 2 * margin) + margin
    parts = [
        Markup('<rect class="frame" x=".5" y=".5" width="{:g}" height="{:g}"/>').format(
            width - 1, height - 1
        )
    ]
    drawn = Markup('<g class="{}"><use href="#{}" x="{:.1f}" y="{:.1f}"/>{}<title>{}</title></g>')
    ring = Markup('<circle class="ring" cx="{:.1f}" cy="{:.1f}" r="7.5"/>')
    for point, (x, y) in zip(points, scaled, strict=True):
        circle = Markup("") if point.correct else ring.format(x, y)
        parts.append(
            drawn.format(label_class(point.label), marker_id(point.label), x, y, circle, point.text)
        )
    return _svg(width, height, label, *parts)


def interval_bar(number: int, low: float, value: float, high: float, alone: float | None) -> Markup:
    """An accuracy with its interval on a scale of 0 to 1; a hollow circle for training alone."""
    width = 170.0
    height = 20.0
    margin = 6.0

    def at(share: float) -> float:
        return margin + share * (width - 2 * margin)

    parts = [_line(at(tick), 2, at(tick), height - 2, "grid") for tick in (0, 0.25, 0.5, 0.75, 1)]
    parts.append(_line(at(low), height / 2, at(high), height / 2, f"bar {node_class(number)}"))
    if alone is not None:
        parts.append(
            Markup('<circle class="alone" cx="{:.1f}" cy="10" r="4.5"/>').format(at(alone))
        )
    parts.append(
        Markup('<circle class="dot n{}" cx="{:.1f}" cy="10" r="4"/>').format(
            number % COLOURS, at(value)
        )
    )
    alone_text = f", alone {alone:.0%}" if alone is not None else ""
    label = f"{value:.0%}, interval {low:.0%} to {high:.0%}" + alone_text
    return _svg(width, height, label, *parts)


# Timelines


class Lane(NamedTuple):
    """A node's row of the timeline."""

    name: str
    number: int
    spans: Sequence[Span]


def timeline_chart(lanes: Sequence[Lane], begin: float, end: float, label: str) -> Markup:
    """What each node did between two moments, computing above the network;
    gaps are times that were not recorded.
    """
    width = 1000.0
    left = 112.0
    pitch = 34.0
    top = 22.0
    bottom = 30.0
    height = top + pitch * len(lanes) + bottom
    scale = (width - left - 10) / ((end - begin) or 1.0)

    def at(moment: float) -> float:
        return left + (min(max(moment, begin), end) - begin) * scale

    parts = []
    for value in ticks(0, end - begin, 10):
        parts.append(_line(at(begin + value), top, at(begin + value), height - bottom, "grid"))
        parts.append(
            _text(at(begin + value), height - bottom + 15, f"{value:g} s", "tick", "middle")
        )
    parts += _round_marks(lanes, begin, end, at)
    for row, lane in enumerate(lanes):
        y = top + pitch * row + 4
        parts.append(_text(0, y + 14, shorten(lane.name, 15), f"name n{lane.number % COLOURS}"))
        for activity in ACTIVITIES:
            path = _bars(lane.spans, activity, begin, end, at, y)
            part = (
                Markup('<path class="{}" d="{}"/>').format(activity, path) if path else Markup("")
            )
            parts.append(part)
    return _svg(width, height, label, *parts)


# offset and height
_TRACKS = {"waiting": (6.0, 2.0), "training": (0.0, 14.0), "refining": (0.0, 14.0)}
_NETWORK = (17.0, 7.0)


def _bars(
    spans: Sequence[Span],
    activity: Activity,
    begin: float,
    end: float,
    at: Callable[[float], float],
    y: float,
) -> str:
    """One path for all spans of an activity, since a long run has thousands."""
    offset, height = _TRACKS.get(activity, _NETWORK)
    return "".join(
        (
            f"M{(x := at(span.begin)):.1f} "
            f"{y + offset:g}h{max(at(span.end) - x, 0.3):.1f}v{height:g}H{x:.1f}z"
        )
        for span in spans
        if span.activity == activity and span.end > begin and span.begin < end
    )


def _round_marks(
    lanes: Sequence[Lane], begin: float, end: float, at: Callable[[float], float]
) -> list[Markup]:
    """Labels where the first node begins to train each round; as many as there is room for."""
    begun: dict[int, float] = {}
    for span in sorted(
        chain.from_iterable(lane.spans for lane in lanes), key=lambda span: span.begin
    ):
        if span.activity == "training" and begin <= span.begin <= end:
            begun.setdefault(span.round, span.begin)
    every = next(
        (step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if len(begun) / step <= 12), 1000
    )
    round_marks: list[Markup] = []
    for round_, moment in begun.items():
        if round_ % every == 0 or len(begun) < 8:
            words = f"round {round_}" if len(begun) < 8 else f"{round_}"
            round_marks.append(_text(at(moment), 13, words, "tick"))
    return round_marks


def middle_rounds(lanes: Sequence[Lane], rounds: int = 3) -> tuple[float, float]:
    """Begin and end of a few rounds in the middle of the run."""
    worked = []
    for lane in lanes:
        for span in lane.spans:
            if span.activity != "waiting":
                worked.append(span)
    numbers = sorted({span.round for span in worked})
    start = max(0, (len(numbers) - rounds) // 2)
    chosen = [span for span in worked if span.round in numbers[start : start + rounds]]
    return min(span.begin for span in chosen), max(span.end for span in chosen)


def median_durations(lane: Lane) -> dict[Activity, float]:
    """Median seconds of each activity in a round; activities without spans are left out."""
    lengths = {}
    for a in ACTIVITIES:
        lengths[a] = [span.end - span.begin for span in lane.spans if span.activity == a]
    return {activity: median(values) for activity, values in lengths.items() if values}
