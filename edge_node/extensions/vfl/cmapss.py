"""NASA's C-MAPSS turbofan engines (set FD002 in the paper): their files as arrays,
and as CSV of sensors and head.

A product is a row: one flight of one engine. Its class is the remaining useful life in flights, at
most 130.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError

CYCLES = 15  # rows of a sample
LIFE = 130  # flights; more count as these
CLASSES = tuple(str(life) for life in range(LIFE + 1))
SETTINGS = tuple(f"setting_{n}" for n in range(1, 4))
COLUMNS = SETTINGS + tuple(f"sensor_{n}" for n in range(1, 22))
# the paper does not say which sensor sees which columns
SENSORS = {"first": COLUMNS[:12], "second": COLUMNS[12:]}


class Engines(NamedTuple):
    """Rows of a file, engine after engine, flight after flight."""

    engine: NDArray[np.int64]  # [R]
    cycle: NDArray[np.int64]  # [R], from 1
    values: NDArray[np.float32]  # [R, 24], as COLUMNS
    life: NDArray[np.int64]  # [R] remaining useful life, clipped

    def labelled(self) -> NDArray[np.int64]:
        """The rows that end a sample: those with CYCLES - 1 rows of the same engine before them."""
        return np.flatnonzero(self.cycle >= CYCLES)

    def samples(self, rows: NDArray[np.int64], columns: Sequence[str]) -> NDArray[np.float32]:
        """What `Samples` makes of these rows, float32 [N, columns, CYCLES]; not scaled."""
        chosen = self.values[:, [COLUMNS.index(column) for column in columns]]
        return np.ascontiguousarray(
            chosen[rows[:, None] + np.arange(1 - CYCLES, 1)].transpose(0, 2, 1)
        )


def load_engines(path: Path, lives: Path | None = None) -> Engines:
    """Read `train_FD002.txt`, or `test_FD002.txt` with its `RUL_FD002.txt`; .gz too.

    Args:
        path: 26 columns: engine, cycle, 3 settings, 21 sensors.
        lives: what remains to each engine after its last row; without it, engines end by failing.

    Raises:
        UsageError: the files are not C-MAPSS's.
    """
    table = _read_table(path)
    if table.shape[1] != 2 + len(COLUMNS):
        raise UsageError(
            f"{path} has {table.shape[1]} columns, C-MAPSS {2 + len(COLUMNS)}",
            "pass train_FD002.txt as NASA publishes it, or its .gz",
        )
    engine = table[:, 0].astype(np.int64)
    cycle = table[:, 1].astype(np.int64)
    names, last = np.unique(engine[::-1], return_index=True)
    remaining = (
        np.zeros(len(names), np.int64)
        if lives is None
        else _read_table(lives)[:, 0].astype(np.int64)
    )
    if len(remaining) != len(names):
        raise UsageError(
            f"{lives} has lives of {len(remaining)} engines, {path} has {len(names)} engines",
            "pass the RUL file of the same set",
        )
    ends = cycle[::-1][last] + remaining
    life = np.minimum(ends[np.searchsorted(names, engine)] - cycle, LIFE)
    return Engines(engine, cycle, table[:, 2:].astype(np.float32), life)


def _read_table(path: Path) -> NDArray[np.float64]:
    try:
        return np.loadtxt(path, ndmin=2)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", "pass the path of a C-MAPSS file") from None
    except ValueError as error:
        raise UsageError(
            f"{path} is no C-MAPSS file: {error}", "pass numbers between spaces, as published"
        ) from None


def convert_to_csv(path: Path, folder: Path, lives: Path | None = None) -> None:
    """Write `SENSOR.csv` of each of SENSORS and `labels.csv`, the files of sensors and head,
    in the order of `path`.

    Each has the settings, which say the operating condition (`vfl join --condition`).
    """
    engines = load_engines(path, lives)
    folder.mkdir(parents=True, exist_ok=True)
    products = [
        f"e{engine}c{cycle}" for engine, cycle in zip(engines.engine, engines.cycle, strict=True)
    ]
    for name, columns in SENSORS.items():
        header = list(dict.fromkeys((*columns, *SETTINGS)))
        chosen = engines.values[:, [COLUMNS.index(column) for column in header]]
        rows = zip(products, engines.engine, chosen, strict=True)
        cells = ([product, engine, *values] for product, engine, values in rows)
        _write_csv(folder / f"{name}.csv", ["product", "engine", *header], cells)
    labels = ([products[row], engines.life[row]] for row in engines.labelled())
    _write_csv(folder / "labels.csv", ["product", "label"], labels)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
