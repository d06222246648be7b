"""Accuracy against bytes: what a codec costs in points, and what of the bytes it leaves."""

from typing import Any

import msgspec
import pytest

from research.afedcl import codec_tables, figures
from research.afedcl.cell import Finished
from tests.support.finished_cells import finished


def cell(method: str, own: float, rounds: int, codec: Any = msgspec.UNSET, **more: Any) -> Finished:
    made = finished(method, own, own=own, everyone=own - 0.1, **more)
    changed = msgspec.structs.replace(made.cell, rounds=rounds, codec=codec)
    sent = (20_000_000, 30_000_000) if codec else msgspec.UNSET
    return msgspec.structs.replace(made, key=changed.key, cell=changed, bytes=sent)


CELLS = [
    cell("fedavg", 0.80, 30),
    cell("fedavg", 0.90, 30, seed=1),
    cell("fedavg", 0.81, 30, "int4"),
    cell("afedcl_plus", 0.85, 12),
    cell("gaussian", 0.70, 1),
]


def test_a_codec_is_compared_with_the_same_seeds_of_its_method_without_one() -> None:
    _, (table,) = codec_tables.tables(CELLS)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["FedAvg, int4"] == ["81.0 / 71.0 [1]", "+1.0 / +1.0", "20.0 / 30.0", "1/11.1"]
    assert rows["FedAvg, none"] == ["85.0 / 75.0", "", "273.0 / 282.1", ""]


def test_what_a_node_sends_and_receives_is_the_mean_over_seeds() -> None:
    one = cell("fedavg", 0.5, 30)
    seeds = [
        msgspec.structs.replace(one, bytes=(sent, 2 * sent)) for sent in (10_000_000, 30_000_000)
    ]
    assert codec_tables.mean_megabytes(seeds) == (20.0, 40.0)


@pytest.mark.parametrize(
    ("method", "rounds", "sent"),
    [("afedcl_plus", 12, (122.6, 143.2)), ("gaussian", 1, (6.7, 24.9))],
)
def test_without_a_codec_rounds_sums_and_the_result_travel_in_full(
    method: str, rounds: int, sent: tuple[float, float]
) -> None:
    assert codec_tables.megabytes(cell(method, 0.5, rounds)) == pytest.approx(sent)


def test_the_figure_has_a_line_for_each_method() -> None:
    figure, caption = figures.draw("codecs", CELLS)
    assert {line.get_label() for line in figure.axes[0].lines} == {"FedAvg", "AFedCL+", "Gaussian"}
    assert "receives in all rounds" in caption
