"""The table of nodes, for terminals of any size."""

import pytest

from edge.terminal.tables import Row, node_table
from tests.support.terminal import console, text_lines

ROWS = {
    "plant-1": Row("receiving", "50%", {"round": "1", "loss": "0.125"}),
    "plant-2": Row("gone", "", {"loss": "0.250"}),
    "[red]plant:smile:": Row("waiting", "", {"round": "12"}),
}


def table(width: int, max_rows: int = 10, rows: dict[str, Row] = ROWS) -> list[str]:
    titles = ("round", "state", "loss", "up")
    return text_lines(node_table(rows, titles, ("state", "round"), console(width), max_rows), width)


def test_columns_are_aligned_in_their_order_and_one_without_text_is_left_out() -> None:
    assert table(60) == [
        "node               round  state            loss",
        "plant-1                1  receiving 50%   0.125",
        "plant-2                   gone            0.250",
        "[red]plant:smile:     12  waiting",
    ]


@pytest.mark.parametrize(
    ("width", "columns"),
    [(60, "node round state loss"), (45, "node round state"), (32, "node state"), (12, "node")],
)
def test_the_least_important_columns_are_dropped_first(width: int, columns: str) -> None:
    assert table(width)[0].split() == columns.split()


def test_rows_without_room_are_counted_by_their_state() -> None:
    assert table(60, 2)[2:] == ["and 2 more: 1 gone, 1 waiting"]
    assert table(60, 3)[-1].startswith("[red]plant")


def test_what_others_named_moves_no_cursor() -> None:
    (_, row) = table(60, rows={"a\x1b[2J\n": Row("waiting", "", {"round": "1"})})
    assert row.split() == ["a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}", "1", "waiting"]
