"""Which method suits plants with few images: accuracy in every setting,
differences over settings, what rounds cost.
"""

from typing import Any

import msgspec
import pytest

from research.afedcl import figures, scarce_tables
from research.afedcl.cell import Finished
from tests.support.finished_cells import NEU, finished

FIVE = msgspec.structs.replace(NEU, samples=5, classes_per_node=3)
SKEWED = msgspec.structs.replace(NEU, partition="dirichlet")


def cell(
    method: str, own: float, everyone: float, rounds: int = 30, *, pooled: bool = False, **more: Any
) -> Finished:
    made = finished(method, own, own=own, everyone=everyone, **more)
    changed = msgspec.structs.replace(
        made.cell, size=64, rounds=rounds, pooled=pooled or msgspec.UNSET
    )
    return msgspec.structs.replace(made, key=changed.key, cell=changed)


CELLS = [
    cell("fedavg", 0.80, 0.70, setting=FIVE),
    cell("fedavg", 0.84, 0.72, setting=FIVE, seed=1),
    cell("fedavg", 0.60, 0.50, setting=SKEWED),
    cell("afedcl_plus", 0.85, 0.75, 12, setting=FIVE),
    cell("afedcl_plus", 0.85, 0.75, 12, setting=FIVE, seed=1),
    cell("afedcl_plus", 0.50, 0.40, 3, setting=FIVE),
    cell("afedcl_plus", 0.59, 0.58, 12, setting=SKEWED),
    cell("local", 0.90, 0.80, setting=FIVE, pooled=True),
]


PLACE = scarce_tables.Place.of(CELLS[0].cell)


def test_each_setting_has_a_row_with_own_and_all_and_what_was_not_run_is_empty() -> None:
    _, (accuracies, *_) = scarce_tables.tables(CELLS)
    assert accuracies.columns == ["", "FedAvg", "AFedCL+", "one place"]
    assert accuracies.rows == [
        ["NEU-CLS, 10 images, Dirichlet", "60.0 / 50.0 [1]", "59.0 / 58.0 [1]", ""],
        ["NEU-CLS, 5 images, disjoint, 3 classes", "82.0 / 71.0", "85.0 / 75.0", "90.0 / 80.0 [1]"],
    ]


def test_differences_have_settings_as_blocks_and_name_the_worst() -> None:
    """+3 of two seeds and -1 of one are two blocks: their mean is 1, not 5/3."""
    _, (_, differences, _) = scarce_tables.tables(CELLS)
    (row,) = [row for row in differences.rows if row[0] == "FedAvg"]
    assert row[1] == "2"
    assert row[2].startswith("+1.0 ± 25.4 [-1.0: NEU-CLS, 10 images, Dirichlet]")
    assert row[3].startswith("+6.0 ± 25.4 [+4.0: NEU-CLS, 5 images, disjoint, 3 classes]")


def test_what_a_setting_has_of_its_own_is_told_and_never_averaged_with_others() -> None:
    first = cell("fedavg", 0.80, 0.70, setting=FIVE)
    larger = msgspec.structs.replace(first.cell, size=128)
    other = msgspec.structs.replace(first.cell, model="efficientnet_lite0")
    many = msgspec.structs.replace(first.cell, setting=msgspec.structs.replace(FIVE, nodes=10))
    made = [
        first,
        *(
            msgspec.structs.replace(first, key=each.key, cell=each)
            for each in (larger, other, many)
        ),
    ]
    _, (accuracies,) = scarce_tables.tables(made, with_cost=False)
    place = "NEU-CLS, 5 images, disjoint, 3 classes"
    assert [row[0] for row in accuracies.rows] == [
        f"{place}, efficientnet_lite0",
        place,
        f"{place}, 128 px",
        f"{place}, 10 plants",
    ]


@pytest.mark.parametrize(
    ("curve", "settled"),
    [
        ({3: 80.0, 6: 88.0, 9: 90.0, 12: 89.5}, 9),
        ({3: 89.0, 6: 80.0, 9: 90.0}, 9),
        ({5: 95.0, 10: 90.0}, 5),
    ],
)
def test_a_curve_has_settled_where_it_never_again_lies_a_point_below_its_end(
    curve: dict[int, float], settled: int
) -> None:
    assert scarce_tables.settles(curve) == settled


def test_curves_come_from_histories_or_after_sums_from_runs_of_other_lengths() -> None:
    measured: list[float | None] = [None, 0.5, None, 0.6]
    found = scarce_tables.curves(
        [cell("fedavg", 0.7, 0.5, 4, setting=FIVE, history={"accuracy": measured}), *CELLS]
    )
    assert found["fedavg", PLACE] == {2: 50.0, 4: 60.0}
    assert found["afedcl_plus", PLACE] == {3: 50.0, 12: 85.0}


def test_sums_and_rounds_cost_bytes_and_seconds() -> None:
    assert scarce_tables.cost("gaussian", 1) == pytest.approx((6.7, 0.2))
    assert scarce_tables.cost("fedavg", 30) == pytest.approx((273, 9.9))
    assert scarce_tables.cost("afedcl_plus", 12) == pytest.approx((13.4 + 109.2, 0.4 + 12 * 0.36))
    assert scarce_tables.cost("local", 30)[0] == 0


def test_the_picture_has_bytes_and_seconds_with_a_star_where_a_curve_settles() -> None:
    measured: list[float | None] = [None, 0.5, None, 0.6]
    figure, caption = figures.draw(
        "scarce",
        [cell("fedavg", 0.7, 0.5, 4, setting=FIVE, history={"accuracy": measured}), *CELLS],
    )
    above, below = figure.axes
    drawn = {line.get_label(): line.get_xydata().round(2).tolist() for line in above.lines}
    assert drawn["FedAvg"] == [[18.2, 50.0], [36.4, 60.0]]
    assert [
        line.get_xydata().round(1).tolist() for line in above.lines if line.get_marker() == "*"
    ] == [
        [[36.4, 60.0]],
        [[122.6, 85.0]],
    ]
    assert "seconds" in below.get_xlabel()
    assert "a point of its end" in caption
