"""A picture of federations as lines for a terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby

from rich.console import Console
from rich.text import Text

from broker_config.protocol import topics
from broker_config.protocol.errors import printable
from broker_config.protocol.messages import NodeState
from broker_config.protocol.vfl_messages import LineOverview
from edge.status.federations import Picture, View
from edge.terminal.formatting import (
    EXPIRY_WARNING,
    format_bytes,
    format_expiry,
    format_names,
    format_remaining,
    pluralize,
)
from edge.terminal.tables import Redrawn, Row, fit, table

_ORDER = ("doing", "last seen", "round", "weight", "up")  # the last three are of what a node has contributed
_RANKS = ("doing", "last seen", "round", "up", "weight")
_ERRORS = 5  # lines
_FEWEST_ROWS = 3


def lines(picture: Picture, width: int, height: int | None = None) -> list[Text]:
    """One federation with its nodes, or several with two lines each; of `height` lines if it says so, and room is."""
    views = picture.views()
    if len(views) == 1:
        drawn = _whole(views[0], picture.now(), width, height)
    else:
        drawn = [line for view in views for line in _brief(view, picture.now(), width)]
    for name, overview in picture.learning.items():
        drawn += _learning(name, overview, width)
    for problem in _problems(picture):
        drawn += _wrapped(problem, width, "red")
    fit(drawn, width)
    return drawn


def live(picture: Picture, changes: Iterator[None], console: Console) -> None:
    """Draw it in place until there are no more changes; between them its seconds go on."""
    with Redrawn(console, lambda width, height: lines(picture, width, height)):
        for _ in changes:
            pass


def _whole(view: View, now: datetime, width: int, height: int | None) -> list[Text]:
    above = _head(view, width)
    for notice in notices(view, now):
        above += _wrapped(notice, width, "yellow")
    below = [*_errors(view.nodes), *_foot(view)]
    rows = {node.node: _row(node) for node in view.nodes}
    if not rows:
        return [*above, *below]
    room = len(rows) if height is None else max(_FEWEST_ROWS, height - len(above) - len(below) - 2)
    return [*above, *table(rows, _ORDER, _RANKS, width, room), *below]


def _learning(name: str, line: LineOverview, width: int) -> list[Text]:
    """A line whose sensors learn together."""
    state = "paused" if line.paused and line.status == "open" else {"open": "learning"}.get(line.status, line.status)
    loss = "" if line.loss is None else f", loss {line.loss:.3f}"
    rows = {
        each.name: Row(
            "" if each.present else "absent",
            "",
            {
                "latency": "" if each.latency is None else f"{1000 * each.latency:.0f} ms",
                "iterations": str(each.iterations or ""),
            },
        )
        for each in line.sensors
    }
    title = Text(printable(f"line {name}: {pluralize(len(rows), 'sensor')}"), style="bold")
    standing = f"{state}: {pluralize(line.round, 'round')} closed{loss}, {line.rate:.1f} rounds a second"
    order = ("doing", "latency", "iterations")
    drawn = [title, *_wrapped(standing, width), *table(rows, order, order, width, len(rows))]
    for each in line.sensors:
        if each.lacks:
            drawn += _wrapped(printable(f"the line waits for {each.name}, which lacks {each.lacks}"), width, "yellow")
    return drawn


def _brief(view: View, now: datetime, width: int) -> list[Text]:
    head, unattended = _head(view, width), view.status in ("gathering", "open") and not view.online
    return [*head, *_wrapped(next(notices(view, now)), width, "yellow")] if unattended else head


def _head(view: View, width: int) -> list[Text]:
    rule = "" if view.rule == "mean" else f", {view.rule}"
    title = Text(printable(f"federation {view.federation}: {view.method}, {view.model}{rule}"), style="bold")
    return [title, *_wrapped(_standing(view), width)]


def _standing(view: View) -> str:
    match view.status:
        case "gathering":
            there = sum(node.doing not in ("absent", "refused") for node in view.nodes)
            of = "" if view.age is None else f"{there} of "
            return f"waiting for its nodes: {of}{view.start}, {pluralize(view.rounds, 'round')}"
        case "finished":
            return f"finished: {pluralize(view.rounds, 'round')}"
        case "aborted":
            return f"aborted in round {view.round} of {view.rounds}: {printable(view.reason)}"
    came = "" if view.age is None else f": {pluralize(view.contributions, 'contribution')} (quorum {view.quorum})"
    left = "" if view.left is None else f", {format_remaining(view.left)} to its deadline"
    return f"round {view.round} of {view.rounds}{came}{left}"


def notices(view: View, now: datetime) -> Iterator[str]:
    """What deserves attention."""
    running = view.status in ("gathering", "open")
    if running and not view.online:
        yield "the coordinator is offline: nodes wait for it, and go on when it is back"
    awaited = [node for node in view.nodes if node.awaited]
    if view.paused:
        away = [node for node in awaited if node.doing == "absent"]
        names = format_names([node.node for node in away or awaited])
        yield f"paused: round {view.round} waits for {names or 'more nodes'} to come back"
    elif awaited and view.status == "open":
        yield f"round {view.round} waits for {format_names([node.node for node in awaited])}"
    if view.age is None and running:
        topic = topics.status(view.federation)
        yield f"nothing is known of the nodes: this user may not read {topic}, or the coordinator is an older one"
    if view.more:
        yield f"{pluralize(view.more, 'node')} more had no room in the coordinator's message"
    soon = sorted((end.date(), name) for name, end in view.certificates.items() if end - now < EXPIRY_WARNING)
    for _, same in groupby(soon, lambda each: each[0]):
        members = [name for _, name in same]
        expiry = format_expiry(view.certificates[members[0]], now)
        yield f"the certificate of {format_names(members)} {expiry}: new kits are needed"
    if view.charter and view.charter - now < EXPIRY_WARNING:
        yield f"the charter in this kit {format_expiry(view.charter, now)}: a new kit is needed"


def _problems(picture: Picture) -> Iterator[str]:
    if picture.lost:
        yield f"connection lost ({picture.lost}); trying again"
    for topic, error in picture.unreadable.items():
        yield f"ignored an unreadable message on {topic}: {printable(error)}"


def _row(node: NodeState) -> Row:
    cells = {
        "round": str(node.round or ""),
        "weight": "" if node.weight is None else f"{node.weight:.3f}",
        "up": format_bytes(node.bytes) if node.bytes else "",
        "last seen": "" if node.heard is None else format_remaining(node.heard),
    }
    return Row(node.doing, f"{100 * node.done // node.total}%" if node.total else "", cells)


def _errors(nodes: Sequence[NodeState]) -> Iterator[Text]:
    failed = [node for node in nodes if node.error]
    for node in failed[:_ERRORS]:
        yield Text(f"{node.node}: {printable(node.error)}", style="red")
    if len(failed) > _ERRORS:
        yield Text(f"and {pluralize(len(failed) - _ERRORS, 'error')} more", style="red")


def _foot(view: View) -> Iterator[Text]:
    if view.age is not None:
        yield Text(f"last change {format_remaining(view.age)} ago", style="dim")


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    return [Text(line, style=style) for line in textwrap.wrap(text, width)]
