"""Accuracy against epsilon: what privacy takes from a method with the same images."""

from typing import Any

import msgspec

from research.afedcl import privacy_tables
from research.afedcl.cell import Finished
from tests.support.finished_cells import finished


def cell(method: str, own: float, samples: int, epsilon: str = "", **more: Any) -> Finished:
    made = finished(method, own, own=own, everyone=own - 0.1, **more)
    setting = msgspec.structs.replace(made.cell.setting, samples=samples)
    changed = msgspec.structs.replace(
        made.cell, setting=setting, privacy={"epsilon": epsilon} if epsilon else msgspec.UNSET
    )
    return msgspec.structs.replace(made, key=changed.key, cell=changed)


CELLS = [
    cell("gaussian", 0.80, 10),
    cell("gaussian", 0.90, 10, seed=1),
    cell("gaussian", 0.70, 10, "3"),
    cell("gaussian", 0.85, 90, "3"),
    cell("fedavg", 0.95, 10),
]


def test_a_private_federation_is_compared_with_the_same_one_without_noise() -> None:
    _, (table,) = privacy_tables.tables(CELLS)
    rows = {tuple(row[:3]): row[3:] for row in table.rows}
    assert rows["Gaussian", "10", "none"] == ["85.0 / 75.0", ""]
    assert rows["Gaussian", "10", "3"] == ["70.0 / 60.0 [1]", "-10.0 / -10.0"]
    assert rows["Gaussian", "90", "3"] == ["85.0 / 75.0 [1]", ""]
    assert rows["FedAvg", "10", "none"] == ["95.0 / 85.0 [1]", ""]
