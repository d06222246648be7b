"""Tables in a terminal: as many columns as there is room for, redrawn in place."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

_GAP = 2  # columns between two cells
_DOING = len("receiving 100%")
_SHORTEST_NAME = 8
STYLES = {
    "waiting": "dim",
    "receiving": "cyan",
    "training": "green",
    "sending": "blue",
    "judging": "magenta",
    **dict.fromkeys(("absent", "gone", "left out", "refused"), "red"),
    "late": "yellow",
}


class Redrawn(Live):
    """Lines that are drawn anew in place, for the terminal's width and height of the moment.

    rich's live view, which also clears what the terminal has wrapped since, because it was made narrower.
    """

    def __init__(self, console: Console, draw: Callable[[int, int], Sequence[Text]]):
        self._lines = draw
        self._widths: list[int] = []  # of the lines that were drawn last
        super().__init__(
            console=console, get_renderable=self._draw, refresh_per_second=4, redirect_stdout=False, transient=False
        )

    def _draw(self) -> Group:
        lines = self._lines(self.console.width, self.console.height)
        self._next = [line.cell_len for line in lines]
        return Group(*lines)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Move up over the last drawing and draw anew."""
        wrapped = sum(max(1, -(-width // self.console.width)) - 1 for width in self._widths)
        upwards = Control(*((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * wrapped)
        first, *rest = super().process_renderables(renderables)
        self._widths = self._next
        return [first, upwards, *rest]


class Row(NamedTuple):
    """A node: what it does, how much of it is done, and its other cells by their titles."""

    doing: str
    part: str
    cells: Mapping[str, str]

    def cell(self, title: str) -> str:
        """The text under this title."""
        return f"{self.doing} {self.part}".rstrip() if title == "doing" else self.cells.get(title, "")


class _Column(NamedTuple):
    title: str
    width: int


def table(rows: Mapping[str, Row], order: Sequence[str], ranks: Sequence[str], width: int, room: int) -> list[Text]:
    """A head and a line for each node, in `room` + 1 lines of `width` at most; nodes without a line are counted.

    `order` are the titles from left to right, `ranks` the same or some of them, the most important ones first: the
    others are dropped first where there is no room. A column of which nothing is known is left out.
    """
    names = list(rows)
    shown, hidden = (names, []) if len(names) <= room else (names[: room - 1], names[room - 1 :])
    longest = max(len(name) for name in (*shown, "node"))
    columns = _columns(rows, sorted(order, key=lambda title: ranks.index(title) if title in ranks else len(ranks)))
    beside = sum(_GAP + column.width for column in columns[:2])  # at any rate
    wide = min(longest, max(_SHORTEST_NAME, width - beside))
    columns = sorted(_that_fit(columns, width - wide), key=lambda column: order.index(column.title))
    head = (" " * _GAP).join(["node".ljust(wide), *(_aligned(column.title, column) for column in columns)])
    lines = [Text.assemble((head.rstrip(), "bold"))]
    lines += [_line(name, rows[name], wide, columns) for name in shown]
    if hidden:
        doing = Counter(rows[name].doing or "done" for name in hidden)
        told = ", ".join(f"{count} {what}" for what, count in doing.most_common())
        lines.append(Text(f"and {len(hidden)} more: {told}", style="dim"))
    return lines


def _line(name: str, row: Row, wide: int, columns: Sequence[_Column]) -> Text:
    line = Text(_shortened(name, wide).ljust(wide))
    for column in columns:
        style = STYLES.get(row.doing, "") if column.title == "doing" else ""
        line.append(" " * _GAP)
        line.append(_aligned(row.cell(column.title), column), style=style)
    line.rstrip()
    return line


def _columns(rows: Mapping[str, Row], titles: Sequence[str]) -> list[_Column]:
    """All columns of which something is known."""
    columns = []
    for title in titles:
        cells = [row.cell(title) for row in rows.values()]
        if any(cells):
            least = _DOING if title == "doing" else len(title)
            columns.append(_Column(title, max(least, *map(len, cells))))
    return columns


def _that_fit(columns: Sequence[_Column], room: int) -> list[_Column]:
    """As many of the columns as there is room for, in their order; a narrow one may take the place of a wide one."""
    chosen = []
    for column in columns:
        if _GAP + column.width <= room:
            room -= _GAP + column.width
            chosen.append(column)
    return chosen


def _aligned(text: str, column: _Column) -> str:
    return text.ljust(column.width) if column.title == "doing" else text.rjust(column.width)


def fit(lines: Sequence[Text], width: int, *, ascii_only: bool = False) -> None:
    """Cut what is wider than the terminal."""
    for line in lines:
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
        line.no_wrap = True


def _shortened(name: str, width: int) -> str:
    """A name that keeps both ends: they tell it from others."""
    if len(name) <= width:
        return name
    head = (width - 1) // 2
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
