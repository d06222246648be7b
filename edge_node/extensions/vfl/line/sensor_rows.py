"""A sensor's measurements: rows of a CSV file that grows, and the samples that are made of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.line.csv_tail import (
    MEMORY,
    BadRowError,
    Cells,
    CsvTail,
    ProductIndex,
    Warn,
    log,
)

Array = NDArray[np.float32]
Index = NDArray[np.int64]
_NONE = -1  # instead of an index


class Scaling(NamedTuple):
    """Brings columns of any unit to mean 0 and deviation 1,
    if there are settings within each operating condition.
    """

    mean: Array  # [columns]; with settings [conditions, columns]
    deviation: Array  # likewise; 1 for a column that never changes
    conditions: Array = np.zeros((1, 0), np.float32)  # [conditions, settings]
    settings: Index = np.zeros(0, np.int64)  # [settings]: where they stand in a row

    def __call__(self, rows: Array) -> Array:
        """Rows float32 [..., cells] -> columns [..., columns],
        scaled by the condition that each row is nearest to.
        """
        mean = self.mean
        deviation = self.deviation
        if len(self.settings):
            which = _nearest(self.conditions, rows[..., self.settings])
            mean = mean[which]
            deviation = deviation[which]
        return (rows[..., : mean.shape[-1]] - mean) / deviation


class RowFile(NamedTuple):
    """Location and columns of a sensor's measurements."""

    path: Path  # CSV file with a row for each product; it may grow
    columns: tuple[str, ...]
    product: str = "product"  # column with the product's id
    unit: str | None = None  # column that says which rows follow one another
    # columns that say the operating condition, within which the others are scaled
    settings: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """All columns with numbers: settings that are no features come last."""
        return (*self.columns, *(name for name in self.settings if name not in self.columns))

    def check(self) -> None:
        """Raise UsageError if the file is not there, lacks a column,
        or has a first row that cannot be used.
        """
        Samples(self, 1, lambda _: None).check_start()


class Samples:
    """Samples float32 [columns, cycles]: a product's own row and the cycles - 1 before it of the
    same unit.

    A unit (a machine, an engine) that was silent for MEMORY rows starts anew. Rows come in any
    order of products.
    """

    def __init__(self, file: RowFile, cycles: int, warn: Warn = log.warning):
        path, columns, product, unit, settings = file
        unit_or_empty = [unit] if unit else []
        names = [product, *unit_or_empty, *file.cells]
        if not columns or len(set(names)) < len(names) or len(set(settings)) < len(settings):
            raise UsageError(
                "a sensor's columns are none, or one is there twice", "name each column once"
            )
        self.columns = len(columns)
        self.cycles = cycles
        self.scaling: Scaling | None = None  # applied by `get` once it is there; see `fit_scaling`
        self._names = file.cells
        self._unit = unit
        self._settings = np.array([file.cells.index(name) for name in settings], np.int64)
        own_unit = {unit: "--unit"} if unit else {}
        self._file = CsvTail(path, names, warn, {product: "--product"} | own_unit)
        self._products = ProductIndex()
        self._last: dict[str, int] = {}  # number of each unit's last row
        self._number = np.empty(0, np.int64)  # of each row that is kept: its number in the file
        self._values = np.empty((0, len(file.cells)), np.float32)
        # where the row before it of the same unit is kept, or _NONE
        self._previous = np.empty(0, np.int64)
        self._depth = np.empty(0, np.int64)  # rows of its sample that there are, itself included

    def refresh(self) -> bool:
        """Read what was appended to the file since last time; True if there is news.

        EdgeNodeError: see GrowingFile.
        """
        return self._file.read(self._add)

    def check_start(self) -> None:
        """Read the beginning of the file: errors as of `refresh`,
        at once however long the file is.
        """
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
        return number != _NONE and bool(
            self._depth[np.searchsorted(self._number, number)] == self.cycles
        )

    def has_row(self, product: str) -> bool:
        """Whether its own row is there: what its sample lacks then are rows before it."""
        return self._products.row_of(product) != _NONE

    def count_after(self, products: Sequence[str]) -> int:
        """Rows after those of all of these products; 0 if none of them has a row."""
        newest = max(self._products.rows_of(products), default=_NONE)
        return 0 if newest == _NONE else self.count - 1 - newest

    def get(self, products: Sequence[str]) -> tuple[Array, tuple[int, ...]]:
        """Samples float32 [n, columns, cycles], scaled, and which of them are lacking: zeros."""
        there, windows = self._windows(products)
        samples = np.zeros((len(there), self.columns, self.cycles), np.float32)
        if self.scaling is not None:
            windows = self.scaling(windows)
        samples[there] = windows[..., : self.columns].transpose(1, 2, 0)
        return samples, tuple(np.flatnonzero(~there).tolist())

    def fit_scaling(self, products: Sequence[str]) -> None:
        """Scale from now on by the mean and deviation of these products' samples,
        within each operating condition.

        Settings that round to the same whole numbers are one condition, if it has a hundredth of
        the rows and ten; settings themselves are scaled as a whole. Meant for the set of the first
        round; the scaling belongs to the model and is kept with it.
        """
        rows = (
            self._windows(products)[1]
            .transpose(1, 0, 2)
            .reshape(-1, len(self._names))
            .astype(np.float64)
        )
        if not rows.size:
            return
        whole = _measure(rows[:, : self.columns])
        if not len(self._settings):
            self.scaling = Scaling(*whole)
            return
        settings = rows[:, self._settings]
        conditions, counts = np.unique(settings.round(), axis=0, return_counts=True)
        enough = min(max(10, len(rows) / 100), counts.max())
        conditions = conditions[counts >= enough].astype(np.float32)
        which = _nearest(conditions, settings)
        parts = [
            _measure(rows[which == number, : self.columns]) for number in range(len(conditions))
        ]
        mean, deviation = (np.stack(each) for each in zip(*parts, strict=True))
        own = self._settings[self._settings < self.columns]
        mean[:, own] = whole[0][own]
        deviation[:, own] = whole[1][own]
        self.scaling = Scaling(mean, deviation, conditions, self._settings)

    def drop_before(self, before: str) -> None:
        """Drop what no product from this one on needs, except MEMORY rows:
        products may come in another order here.
        """
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
        # its last entry stands for _NONE
        place = np.append(np.where(keep, np.cumsum(keep) - 1, _NONE), _NONE)
        self._previous = place[self._previous[keep]]
        self._number = self._number[keep]
        self._values = self._values[keep]
        self._depth = self._depth[keep]
        alive = self._products.count - MEMORY
        self._last = {unit: last for unit, last in self._last.items() if last >= alive}

    def _windows(self, products: Sequence[str]) -> tuple[NDArray[np.bool_], Array]:
        """Which of them have a whole sample, and the rows of these: float32 [cycles, n,
        cells], as in the file.
        """
        numbers = np.array(self._products.rows_of(products), np.int64)
        there = numbers != _NONE
        rows = np.searchsorted(self._number, numbers[there])
        deep = self._depth[rows] == self.cycles
        there[there] = deep
        rows = rows[deep]
        windows = np.empty((self.cycles, len(rows), len(self._names)), np.float32)
        for cycle in reversed(range(self.cycles)):
            windows[cycle] = self._values[rows]
            rows = self._previous[rows]
        return there, windows

    def _add(self, cells: Cells) -> None:
        """Keep these rows; BadRowError if one of them cannot be used."""
        values = _numbers([row[-len(self._names) :] for row in cells], self._names)
        first = self._products.count
        self._products.add([row[0].strip() for row in cells])
        units = [row[1].strip() for row in cells] if self._unit else [""] * len(cells)
        previous, depth = self._linked(units, first)
        self._number = np.append(self._number, np.arange(first, self._products.count))
        self._values = np.concatenate([self._values, values])
        self._previous = np.append(self._previous, previous)
        self._depth = np.append(self._depth, depth)

    def _linked(self, units: Sequence[str], first: int) -> tuple[Index, Index]:
        """Of new rows, numbered from `first`: where each one's previous row will be,
        and its depth.
        """
        names, group = np.unique(np.array(units), return_inverse=True)
        order = np.argsort(group, kind="stable")  # unit by unit, each in order of time
        group = group[order]
        number = order + first
        opens = np.append(True, group[1:] != group[:-1])  # the first new row of its unit
        before = np.append(_NONE, number[:-1])
        before[opens] = [self._last.get(str(name), _NONE) for name in names]
        before[number - before > MEMORY] = _NONE
        place = np.where(
            before >= first,
            len(self._number) + before - first,
            np.searchsorted(self._number, before),
        )
        place[before == _NONE] = _NONE
        begins = opens | (before == _NONE)
        depth = np.ones(len(order), np.int64)
        linked = begins & (before != _NONE)
        depth[linked] += self._depth[place[linked]]
        start = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
        depth = np.minimum(depth[start] + np.arange(len(order)) - start, self.cycles)
        self._last.update(
            zip(map(str, names), number[np.append(opens[1:], True)].tolist(), strict=True)
        )
        back = np.argsort(order)
        return place[back], depth[back]


def _measure(rows: NDArray[np.float64]) -> tuple[Array, Array]:
    """Mean and deviation of each column, [columns]."""
    mean = rows.mean(0)
    deviation = rows.std(0)
    deviation[deviation <= 1e-6 * np.abs(mean)] = 1.0  # what rounding leaves of a constant
    return mean.astype(np.float32), deviation.astype(np.float32)


def _nearest(conditions: Array, settings: NDArray[np.floating]) -> Index:
    """The number of the condition [C, S] that settings [..., S] are nearest to."""
    distances = sum(
        np.square(settings[..., each, None] - conditions[:, each])
        for each in range(conditions.shape[1])
    )
    return np.asarray(np.argmin(distances, -1), np.int64)


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
                    f"{name} is {text[:40]!r}, not a finite number",
                    "write a number such as 21.5 in each cell",
                )
    raise AssertionError("every cell is a number by itself")


def _finite(text: str) -> bool:
    try:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(float(text))))
    except ValueError:
        return False
