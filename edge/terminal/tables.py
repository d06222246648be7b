"""Tables of nodes for a terminal: as many columns as its width has room for,
and as many rows as its height.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from rich.console import Console, Group, OverflowMethod
from rich.table import Column, Table
from rich.text import Text

from broker_config.protocol.errors import replace_unprintable
from edge.terminal.formatting import shorten

STATE_STYLES = {
    "waiting": "dim",
    "receiving": "cyan",
    "training": "green",
    "sending": "blue",
    "judging": "magenta",
    **dict.fromkeys(("absent", "gone", "left out", "refused"), "red"),
    "late": "yellow",
}
_STATE_WIDTH = len("receiving 100%")  # columns must not move when a state changes
_UNLIMITED = 10_000  # columns, to measure what a table would take


class Row(NamedTuple):
    """One node: its state, the percentage of its transfer, and its other cells by column title."""

    state: str
    percent: str
    cells: Mapping[str, str]

    def cell(self, title: str) -> str:
        """The text below this title."""
        return (
            f"{self.state} {self.percent}".rstrip()
            if title == "state"
            else self.cells.get(title, "")
        )


def node_table(
    rows: Mapping[str, Row],
    titles: Sequence[str],
    priority: Sequence[str],
    console: Console,
    max_rows: int,
) -> Group:
    """A row for each node; below `max_rows` rows, the count of the other nodes by state.

    Args:
        rows: by the node's name, in their order.
        titles: of the columns, from left to right. Columns without any text are left out.
        priority: the same titles or some of them, the most important ones first; where the terminal
            is narrow, the other columns are dropped first, then these from the end.
        console: where the table will be shown.
        max_rows: of the table, without its header.
    """
    names = list(rows)
    shown, hidden = (
        (names, []) if len(names) <= max_rows else (names[: max_rows - 1], names[max_rows - 1 :])
    )
    ranks = {title: rank for rank, title in enumerate(priority)}
    ranked = sorted(titles, key=lambda title: ranks.get(title, len(priority)))
    kept_titles = []
    for title in ranked:
        if any(row.cell(title) for row in rows.values()):
            kept_titles.append(title)
    ranked = kept_titles
    kept = [sorted(ranked[:count], key=titles.index) for count in range(len(ranked), -1, -1)]
    shown_rows = {name: rows[name] for name in shown}
    table = first_that_fits((_table(shown_rows, each, console) for each in kept), console)
    if not hidden:
        return Group(table)
    states = Counter(rows[name].state or "done" for name in hidden)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return Group(table, Text(f"and {len(hidden)} more: {counts}", style="dim"))


def confusion_table(
    confusion: Mapping[str, Mapping[str, int]], classes: Sequence[str], console: Console
) -> Table:
    """How often images of each class (a row) got each verdict (a column),
    and the share that is right.

    Where the terminal is narrow, columns are headed by the number of their class.
    """
    labels = set(chain.from_iterable(confusion.values()))
    columns = [each for each in classes if each in labels or each in confusion]
    numbers = {name: str(index + 1) for index, name in enumerate(columns)}
    headings = ({name: name for name in columns}, numbers)
    return first_that_fits(
        (_confusion_table(confusion, columns, heads, console) for heads in headings),
        console,
    )


def _confusion_table(
    confusion: Mapping[str, Mapping[str, int]],
    columns: Sequence[str],
    heads: Mapping[str, str],
    console: Console,
) -> Table:
    def shown(name: str) -> str:
        return shorten(
            replace_unprintable(name, keep=""), console.width // 4, console.options.ascii_only
        )

    numbered = heads[columns[0]] != columns[0]
    titles = [Column(Text(shown(heads[each])), justify="right", no_wrap=True) for each in columns]
    table = Table(
        "image of, called", *titles, Column("right", justify="right"), box=None, pad_edge=False
    )
    for truth in (each for each in columns if each in confusion):
        row = confusion[truth]
        cells = []
        for each in columns:
            style = "bold" if each == truth else ""
            cells.append(Text(str(row.get(each, "")), style))
        share = f"{100 * row.get(truth, 0) / sum(row.values()):.0f} %"
        heads_text = f"{heads[truth]} {shown(truth)}" if numbered else shown(truth)
        table.add_row(Text(heads_text), *cells, share)
    return table


def _table(rows: Mapping[str, Row], titles: Sequence[str], console: Console) -> Table:
    columns = []
    for title in titles:
        column = (
            Column(
                Text(replace_unprintable(title, keep="")),
                justify="left",
                min_width=_STATE_WIDTH,
                no_wrap=True,
            )
            if title == "state"
            else Column(Text(replace_unprintable(title, keep="")), justify="right", no_wrap=True)
        )
        columns.append(column)
    name_width = 2 * console.width // 5
    table = Table(
        Column("node", overflow="fold"), *columns, box=None, pad_edge=False, header_style="bold"
    )
    for name, row in rows.items():
        cells = []
        for each in titles:
            state_styles = STATE_STYLES.get(row.state, "") if each == "state" else ""
            cells.append(Text(row.cell(each), state_styles))
        table.add_row(
            Text(
                shorten(replace_unprintable(name, keep=""), name_width, console.options.ascii_only)
            ),
            *cells,
        )
    return table


def first_that_fits(tables: Iterable[Table], console: Console) -> Table:
    """The first table that needs no more than the terminal's width; the last one if none does."""
    unlimited = console.options.update(width=_UNLIMITED)
    for table in tables:
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    return table


def one_line(text: str, console: Console, style: str = "") -> Text:
    """A text that others may have written, cut where the terminal ends."""
    overflow: OverflowMethod = "crop" if console.options.ascii_only else "ellipsis"
    return Text(replace_unprintable(text, keep=""), style, no_wrap=True, overflow=overflow)
