"""Tables as Markdown and for a terminal, and the formats of their entries."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import rich.table
from rich.text import Text

from research.runner import statistics


@dataclass(frozen=True)
class Table:
    """Rows of text; a line break in an entry is one in the table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As Markdown, without the title."""

        def row(entries: Iterable[str]) -> str:
            cells = [entry.replace("|", "\\|").replace("\n", "<br>") for entry in entries]
            return f"| {' | '.join(cells)} |"

        return "\n".join(
            [row(self.columns), row(["---"] * len(self.columns)), *map(row, self.rows)]
        )

    def rich(self) -> rich.table.Table:
        """For a terminal."""
        grid = rich.table.Table(title=Text(self.title), title_justify="left", show_lines=True)
        for column in self.columns:
            grid.add_column(Text(column))
        for row in self.rows:
            grid.add_row(*map(Text, row))
        return grid


def format_spread(values: Collection[float], digits: int = 1) -> str:
    """Mean ± standard deviation."""
    mean, deviation, count = statistics.spread(values)
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if count > 1 else "")


def format_difference(difference: statistics.Difference, unit: str = "") -> str:
    """A mean difference with its 95 % interval."""
    mean = round(difference.mean, 1) + 0.0  # never -0.0
    return f"{mean:+.1f}{unit}" + (f" ± {difference.half:.1f}" if difference.pairs > 1 else "")


def mark_fewer(count: int, planned: int) -> str:
    """The number of seeds in brackets, where others have more."""
    return f" [{count}]" if count < planned else ""


def list_fewer(planned: int, seeds: Mapping[str, int]) -> str:
    """A sentence on what has fewer seeds (numbers by name) than planned, empty if nothing has."""
    short = [f"{name} ({count})" for name, count in seeds.items() if count < planned]
    more = f" and {len(short) - 3} more" if len(short) > 3 else ""
    return f"Fewer than {planned} seeds: {'; '.join(short[:3])}{more}." if short else ""
