"""Status of federations as text for a terminal, printed once or redrawn in place."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain, groupby

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from broker_config.protocol import topics
from broker_config.protocol.errors import replace_unprintable
from broker_config.protocol.federation_kinds import KINDS, StatusText, kind_of
from broker_config.protocol.messages import NodeState
from edge.status.federations import FederationStatus, StatusMonitor
from edge.terminal.formatting import (
    EXPIRY_WARNING,
    format_bytes,
    format_expiry,
    format_names,
    format_remaining,
    pluralize,
)
from edge.terminal.tables import Row, node_table, one_line

# the last three are of what a node has contributed
_TITLES = ("state", "last seen", "round", "weight", "up")
_PRIORITY = ("state", "last seen", "round", "up", "weight")
_MAX_ERRORS = 5  # lines
_MIN_ROWS = 3


def render(monitor: StatusMonitor, console: Console, height: int | None = None) -> Group:
    """One federation with its nodes, or two lines for each of several.

    Args:
        monitor: has the federations.
        console: where they will be shown.
        height: lines that should suffice; the table of nodes is shortened accordingly. None for all
            nodes.
    """
    statuses = monitor.statuses()
    now = monitor.now()
    parts: list[RenderableType] = []
    if len(statuses) == 1:
        parts += _details(statuses[0], now, console, height)
    else:
        parts += chain.from_iterable(_brief(status, now, console) for status in statuses)
    for name, overview in monitor.others.items():
        kind = KINDS[kind_of(overview)]
        parts += _other(kind.status(name, overview, monitor.is_online(name)), console)
    parts += (Text(replace_unprintable(problem), "red") for problem in _problems(monitor))
    return Group(*parts)


def show_live(monitor: StatusMonitor, changes: Iterator[None], console: Console) -> None:
    """Redraw the status in place until there are no more changes;
    its times also advance between two changes.
    """

    def draw() -> Group:
        return render(monitor, console, console.height)

    with Live(console=console, get_renderable=draw, refresh_per_second=4, redirect_stdout=False):
        for _ in changes:
            pass


def _details(
    status: FederationStatus, now: datetime, console: Console, height: int | None
) -> list[RenderableType]:
    above = [
        *_headline(status, console),
        *(Text(replace_unprintable(notice), "yellow") for notice in notices(status, now)),
    ]
    below = [*_errors(status.nodes, console), *_age(status)]
    rows = {node.node: _row(node) for node in status.nodes}
    if not rows:
        return [*above, *below]
    max_rows = len(rows)
    if height is not None:
        used = len(console.render_lines(Group(*above, *below), pad=False))
        max_rows = max(_MIN_ROWS, height - used - 2)
    return [*above, node_table(rows, _TITLES, _PRIORITY, console, max_rows), *below]


def _other(text: StatusText, console: Console) -> list[RenderableType]:
    """A federation of a further kind, in its own words."""
    rows = {}
    for member, cells in text.rows.items():
        rows[member] = Row(cells.get("state", ""), "", cells)
    notices = [Text(replace_unprintable(notice), "yellow") for notice in text.notices]
    remarks = [Text(replace_unprintable(remark), "yellow") for remark in text.remarks]
    return [
        one_line(text.title, console, "bold"),
        *(Text(replace_unprintable(line)) for line in text.lines),
        *notices,
        node_table(rows, text.titles, text.titles, console, len(rows)),
        *remarks,
    ]


def _brief(status: FederationStatus, now: datetime, console: Console) -> Iterator[Text]:
    yield from _headline(status, console)
    if status.status in ("gathering", "open") and not status.online:
        yield Text(replace_unprintable(next(notices(status, now))), "yellow")


def _headline(status: FederationStatus, console: Console) -> Iterator[Text]:
    rule = "" if status.rule in ("clipped_mean", "mean") else f", {status.rule}"
    yield one_line(
        f"federation {status.federation}: {status.method}, {status.model}{rule}", console, "bold"
    )
    yield Text(_progress(status))


def _progress(status: FederationStatus) -> str:
    match status.status:
        case "gathering":
            present = sum(node.doing not in ("absent", "refused") for node in status.nodes)
            of = "" if status.age is None else f"{present} of "
            return f"waiting for its nodes: {of}{status.start}, {pluralize(status.rounds, 'round')}"
        case "finished":
            return f"finished: {pluralize(status.rounds, 'round')}"
        case "aborted":
            return (
                f"aborted in round {status.round} of {status.rounds}: "
                f"{replace_unprintable(status.reason)}"
            )
    received = ""
    if status.age is not None:
        received = f": {pluralize(status.contributions, 'contribution')} (quorum {status.quorum})"
    left = "" if status.left is None else f", {format_remaining(status.left)} to its deadline"
    return f"round {status.round} of {status.rounds}{received}{left}"


def notices(status: FederationStatus, now: datetime) -> Iterator[str]:
    """Sentences for what deserves attention."""
    running = status.status in ("gathering", "open")
    if running and not status.online:
        yield "the coordinator is offline: nodes wait for it, and go on when it is back"
    awaited = [node for node in status.nodes if node.awaited]
    if status.paused:
        away = [node for node in awaited if node.doing == "absent"]
        names = format_names([node.node for node in away or awaited])
        yield f"paused: round {status.round} waits for {names or 'more nodes'} to come back"
    elif awaited and status.status == "open":
        yield f"round {status.round} waits for {format_names([node.node for node in awaited])}"
    if status.age is None and running:
        topic = topics.status(status.federation)
        yield (
            f"nothing is known of the nodes: this user may not read {topic}, or the coordinator "
            "is an older one"
        )
    if status.more:
        yield f"{pluralize(status.more, 'more node')} did not fit into the coordinator's message"
    soon = sorted(
        (end.date(), name)
        for name, end in status.certificates.items()
        if end - now < EXPIRY_WARNING
    )
    for _, same in groupby(soon, lambda each: each[0]):
        members = [name for _, name in same]
        expiry = format_expiry(status.certificates[members[0]], now)
        yield f"the certificate of {format_names(members)} {expiry}: new kits are needed"
    if status.charter and status.charter - now < EXPIRY_WARNING:
        yield f"the charter in this kit {format_expiry(status.charter, now)}: a new kit is needed"


def _problems(monitor: StatusMonitor) -> Iterator[str]:
    if monitor.lost:
        yield f"connection lost ({monitor.lost}); trying again"
    for topic, error in monitor.unreadable.items():
        yield f"ignored an unreadable message on {topic}: {error}"


def _row(node: NodeState) -> Row:
    weight = "" if node.weight is None else f"{node.weight:.3f}"
    up = format_bytes(node.bytes) if node.bytes else ""
    remaining = "" if node.heard is None else format_remaining(node.heard)
    cells = {"round": str(node.round or ""), "weight": weight, "up": up, "last seen": remaining}
    done_text = f"{100 * node.done // node.total}%" if node.total else ""
    return Row(node.doing, done_text, cells)


def _errors(nodes: Sequence[NodeState], console: Console) -> Iterator[Text]:
    failed = [node for node in nodes if node.error]
    for node in failed[:_MAX_ERRORS]:
        yield one_line(f"{node.node}: {node.error}", console, "red")
    if len(failed) > _MAX_ERRORS:
        yield Text(f"and {pluralize(len(failed) - _MAX_ERRORS, 'more error')}", "red")


def _age(status: FederationStatus) -> Iterator[Text]:
    if status.age is not None:
        yield Text(f"last change {format_remaining(status.age)} ago", style="dim")
