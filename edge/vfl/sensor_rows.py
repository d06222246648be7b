"""A sensor's measurements: rows of a CSV file that grows, and the samples that are made of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError
from edge.vfl.csv_tail import MEMORY, BadRowError, Cells, CsvTail, ProductIndex, Warn, log

Array = NDArray[np.float32]
Index = NDArray[np.int64]
_NONE = -1  # instead of an index


class Scaling(NamedTuple):
    """Brings columns of any unit to mean 0 and deviation 1: (values - mean) / deviation."""

    mean: Array  # [columns]
    deviation: Array  # [columns]; 1 for a column that never changes


class RowFile(NamedTuple):
    """Location and columns of a sensor's measurements."""

    path: Path  # CSV file with a row for each product; it may grow
    columns: tuple[str, ...]
    product: str = "product"  # column with the product's id
    unit: str | None = None  # column that says which rows follow one another

    def check(self) -> None:
        """Raise UsageError if the file is not there, lacks a column, or has a first row that cannot be used."""
        Samples(self, 1, lambda _: None).check_start()


class Samples:
    """Samples float32 [columns, cycles]: a product's own row and the cycles - 1 before it of the same unit.

    A unit (a machine, an engine) that was silent for MEMORY rows starts anew. Rows come in any order of products.
    """

    def __init__(self, file: RowFile, cycles: int, warn: Warn = log.warning):
        path, columns, product, unit = file
        names = [product, *([unit] if unit else []), *columns]
        if not columns or len(set(names)) < len(names):
            raise UsageError("a sensor's columns are none, or one is there twice", "name each column once")
        self.columns, self.cycles = len(columns), cycles
        self.scaling: Scaling | None = None  # applied by `get` once it is there; see `fit_scaling`
        self._names, self._unit = tuple(columns), unit
        self._file = CsvTail(path, names, warn, {product: "--product"} | ({unit: "--unit"} if unit else {}))
        self._products = ProductIndex()
        self._last: dict[str, int] = {}  # number of each unit's last row
        self._number = np.empty(0, np.int64)  # of each row that is kept: its number in the file
        self._values = np.empty((0, len(columns)), np.float32)
        self._previous = np.empty(0, np.int64)  # where the row before it of the same unit is kept, or _NONE
        self._depth = np.empty(0, np.int64)  # rows of its sample that there are, itself included

    def refresh(self) -> bool:
        """Read what was appended to the file since last time; True if there is news. EdgeNodeError: see GrowingFile."""
        return self._file.read(self._add)

    def check_start(self) -> None:
        """Read the beginning of the file: errors as of `refresh`, at once however long the file is."""
        self._file.check_start(self._add)

    @property
    def count(self) -> int:
        """Rows that have been read since the beginning of the file."""
        return self._products.count

    def since(self, number: int) -> list[str]:
        """Products from this row on, counted from 0, in the order of the file."""
        return self._products.since(number)

    def has_sample(self, product: str) -> bool:
        """Whether there is a sample of it."""
        number = self._products.row_of(product)
        return number != _NONE and bool(self._depth[np.searchsorted(self._number, number)] == self.cycles)

    def has_row(self, product: str) -> bool:
        """Whether its own row is there: what its sample lacks then are rows before it."""
        return self._products.row_of(product) != _NONE

    def get(self, products: Sequence[str]) -> tuple[Array, tuple[int, ...]]:
        """Samples float32 [n, columns, cycles], scaled, and which of them are lacking: zeros."""
        numbers = np.array(self._products.rows_of(products), np.int64)
        there = numbers != _NONE
        rows = np.searchsorted(self._number, numbers[there])
        deep = self._depth[rows] == self.cycles
        there[there], rows = deep, rows[deep]
        samples = np.zeros((len(numbers), self.columns, self.cycles), np.float32)
        samples[there] = self._windows(rows)
        return samples, tuple(np.flatnonzero(~there).tolist())

    def fit_scaling(self, products: Sequence[str]) -> None:
        """Scale from now on by the mean and deviation of these products' samples.

        Meant for the set of the first round; the scaling belongs to the model and is kept with it.
        """
        self.scaling = None
        samples, lacking = self.get(products)
        values = np.delete(samples, lacking, axis=0).transpose(1, 0, 2).reshape(self.columns, -1).astype(np.float64)
        if not values.size:
            return
        mean, deviation = values.mean(1), values.std(1)
        deviation[deviation <= 1e-6 * np.abs(mean)] = 1.0  # what rounding leaves of a constant
        self.scaling = Scaling(mean.astype(np.float32), deviation.astype(np.float32))

    def drop_before(self, before: str) -> None:
        """Drop what no product from this one on needs, except MEMORY rows: products may come in another order here."""
        number = self._products.row_of(before)
        if number == _NONE:
            return
        self._products.drop_before(number - MEMORY)
        first = int(np.searchsorted(self._number, number - MEMORY))
        keep = np.arange(len(self._number)) >= first
        row = self._previous[first:]
        for _ in range(self.cycles - 1):
            row = row[(row != _NONE) & (row < first)]
            keep[row] = True
            row = self._previous[row]
        place = np.append(np.where(keep, np.cumsum(keep) - 1, _NONE), _NONE)  # its last entry stands for _NONE
        self._previous = place[self._previous[keep]]
        self._number, self._values, self._depth = self._number[keep], self._values[keep], self._depth[keep]
        alive = self._products.count - MEMORY
        self._last = {unit: last for unit, last in self._last.items() if last >= alive}

    def _windows(self, rows: Index) -> Array:
        """Of rows whose samples are whole: float32 [n, columns, cycles], scaled."""
        windows = np.empty((self.cycles, len(rows), self.columns), np.float32)
        for cycle in reversed(range(self.cycles)):
            windows[cycle] = self._values[rows]
            rows = self._previous[rows]
        if self.scaling is not None:
            windows = (windows - self.scaling.mean) / self.scaling.deviation
        return windows.transpose(1, 2, 0)

    def _add(self, cells: Cells) -> None:
        """Keep these rows; BadRowError if one of them cannot be used."""
        values = _numbers([row[-self.columns :] for row in cells], self._names)
        first = self._products.count
        self._products.add([row[0].strip() for row in cells])
        units = [row[1].strip() for row in cells] if self._unit else [""] * len(cells)
        previous, depth = self._linked(units, first)
        self._number = np.append(self._number, np.arange(first, self._products.count))
        self._values = np.concatenate([self._values, values])
        self._previous = np.append(self._previous, previous)
        self._depth = np.append(self._depth, depth)

    def _linked(self, units: Sequence[str], first: int) -> tuple[Index, Index]:
        """Of new rows, numbered from `first`: where each one's previous row will be, and its depth."""
        names, group = np.unique(np.array(units), return_inverse=True)
        order = np.argsort(group, kind="stable")  # unit by unit, each in order of time
        group, number = group[order], order + first
        opens = np.append(True, group[1:] != group[:-1])  # the first new row of its unit
        before = np.append(_NONE, number[:-1])
        before[opens] = [self._last.get(str(name), _NONE) for name in names]
        before[number - before > MEMORY] = _NONE
        place = np.where(before >= first, len(self._number) + before - first, np.searchsorted(self._number, before))
        place[before == _NONE] = _NONE
        begins = opens | (before == _NONE)
        depth = np.ones(len(order), np.int64)
        linked = begins & (before != _NONE)
        depth[linked] += self._depth[place[linked]]
        start = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
        depth = np.minimum(depth[start] + np.arange(len(order)) - start, self.cycles)
        self._last.update(zip(map(str, names), number[np.append(opens[1:], True)].tolist(), strict=True))
        back = np.argsort(order)
        return place[back], depth[back]


def _numbers(cells: Cells, names: Sequence[str]) -> Array:
    """Cells as float32 [n, columns]; BadRowError names the first that is no finite number."""
    try:
        with np.errstate(over="ignore"):  # found below
            values = np.array(cells, np.float64).astype(np.float32)
    except ValueError:
        values = None
    if values is not None and np.isfinite(values).all():
        return values
    for row in cells:
        for name, text in zip(names, row, strict=True):
            if not _finite(text):
                raise BadRowError(
                    f"{name} is {text[:40]!r}, not a finite number", "write a number such as 21.5 in each cell"
                )
    raise AssertionError("every cell is a number by itself")


def _finite(text: str) -> bool:
    try:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(float(text))))
    except ValueError:
        return False
