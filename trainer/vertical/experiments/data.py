"""The two data sets of the paper as streams of products: C-MAPSS FD002 for two sensors, CIFAR-10 for four.

Readings of C-MAPSS differ more between the six operating conditions than over an engine's life, so that they are scaled
by condition: with one scale for all, what little tells wear is lost. The scales are those of the first set: a line that
starts to learn knows no more. An operating condition is what the plant sets, known to both sensors.
"""

import gzip
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from broker_config.errors import UsageError
from trainer.seeding import generator
from trainer.vertical.simulate import Stream

Array = NDArray[np.float64]
Pool = Literal["report", "tuning"]

COUNTS = (50_119, 30_365)  # samples of FD002 for training and for the test (paper VII-A)
_TOP = 130  # remaining cycles that count as "many": 131 classes
_SETTINGS = 3  # columns before the readings
_SPREAD = 5.0  # scaled readings end there
_HELD_OUT = {"cmapss": 0.2, "cifar10": 0.1}  # of the training engines or images, while tuning
_FILES = ("train_FD002.txt", "test_FD002.txt", "RUL_FD002.txt")


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How a data set becomes a stream and held-out products."""

    data: str  # cmapss or cifar10
    digest: str  # SHA-256 of the files
    pool: Pool = "report"  # report: the test file is held out; tuning: engines (images) of the training file, by seed
    cycles: int = 15  # of a sample
    scaling: Literal["condition", "global"] = "condition"
    order: Literal["engines", "mixed"] = "engines"  # of arrival: engine by engine in time, or all samples shuffled


class Engines(NamedTuple):
    """C-MAPSS as in its files. A row: engine, cycle (from 1), 3 settings, 21 readings."""

    train: Array  # [rows, 26], to failure
    test: Array  # [rows, 26], cut before
    remaining: Array  # [test engines] cycles after the last row of each


class Pictures(NamedTuple):
    """CIFAR-10: images uint8 [N, 32, 32, 3] and labels [N]."""

    train: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


class Parts(NamedTuple):
    """A stream to learn from, and products that it has not."""

    stream: Stream
    held_out: Stream


Source = Engines | Pictures
Material = Mapping[str, Source]  # by `Split.digest`


def read(name: str, path: Path) -> tuple[str, Source]:
    """The digest and content of a data set: a folder of C-MAPSS, or an NPZ file of CIFAR-10.

    Raises:
        UsageError: it is not there, or something else.
    """
    if name == "cmapss":
        texts = [_text(path, file) for file in _FILES]
        tables = [np.loadtxt(text.splitlines(), ndmin=2) for text in texts]
        if any(table.shape[1] != 26 for table in tables[:2]):
            raise UsageError(f"{path} has rows of other than 26 columns", "pass the folder of the original FD002 files")
        return _digest("".join(texts).encode()), Engines(tables[0], tables[1], tables[2][:, 0])
    try:
        with np.load(path) as file:
            found = Pictures(*(file[key] for key in ("train_images", "train_labels", "test_images", "test_labels")))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} cannot be read as CIFAR-10: {error}",
            "pass an NPZ file with train_images, train_labels, test_images and test_labels",
        ) from error
    return _digest(*(each.tobytes() for each in found)), found


def split(settings: Split, source: Source, seed: int, first: int) -> Parts:
    """Stream and held-out products of a seed; `first` is the size of the first set, which scales are fitted to."""
    if isinstance(source, Engines):
        return _engines(settings, source, seed, first)
    return _pictures(settings, source, seed)


def _engines(settings: Split, source: Engines, seed: int, first: int) -> Parts:
    train, lives = source.train, _lives(source.train)
    kept = _ends(train, settings.cycles)
    if settings.pool == "tuning":
        away = np.isin(train[kept, 0], _some(np.unique(train[:, 0]), _HELD_OUT["cmapss"], seed))
        kept, held_out, other, other_lives = kept[~away], kept[away], train, lives
    else:
        other, other_lives = source.test, _lives(source.test, source.remaining)
        held_out = _ends(other, settings.cycles)
    arriving = _arrival(settings, train, kept, seed)
    scale = Scale.fit(train[arriving[:first], 2:], by_condition=settings.scaling == "condition")
    return Parts(
        _windows(scale(train[:, 2:]), lives, arriving, settings.cycles),
        _windows(scale(other[:, 2:]), other_lives, held_out, settings.cycles),
    )


def _arrival(settings: Split, rows: Array, ends: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    random = generator(seed, "order of arrival")
    if settings.order == "mixed":
        return random.permutation(ends)
    places = random.permutation(int(rows[:, 0].max()) + 1)  # of each engine
    return ends[np.argsort(places[rows[ends, 0].astype(np.int64)], kind="stable")]


def _ends(rows: Array, cycles: int) -> NDArray[np.int64]:
    """Rows that end a window: as many rows of the same engine stand before them."""
    return np.flatnonzero(rows[:, 1] >= cycles)


def _lives(rows: Array, remaining: Array | None = None) -> NDArray[np.int64]:
    """Remaining cycles of each row, at most 130."""
    engines, index = np.unique(rows[:, 0], return_inverse=True)
    last = np.zeros(len(engines))
    np.maximum.at(last, index, rows[:, 1])
    after = np.zeros(len(engines)) if remaining is None else remaining
    return np.minimum(last[index] - rows[:, 1] + after[index], _TOP).astype(np.int64)


def _windows(columns: Array, lives: NDArray[np.int64], ends: NDArray[np.int64], cycles: int) -> Stream:
    """Samples float32 [N, 12, cycles] of each of two sensors: columns 3 to 14 of the file, and 15 to 26."""
    views = np.lib.stride_tricks.sliding_window_view(columns.astype(np.float32), cycles, axis=0)
    samples = views[ends - cycles + 1]
    half = columns.shape[1] // 2
    halves = (np.ascontiguousarray(each) for each in (samples[:, :half], samples[:, half:]))
    return Stream(tuple(map(torch.from_numpy, halves)), torch.from_numpy(lives[ends]))


class Scale(NamedTuple):
    """Mean and deviation of each column, by operating condition."""

    conditions: Array  # [C, 3] settings
    mean: Array  # [C, columns]
    deviation: Array  # [C, columns]

    @classmethod
    def fit(cls, rows: Array, *, by_condition: bool) -> "Scale":
        """To rows [N, columns] whose first three are the settings, which are always scaled as a whole."""
        conditions = np.unique(np.round(rows[:, :_SETTINGS]), axis=0) if by_condition else np.zeros((1, _SETTINGS))
        groups = [rows[_nearest(conditions, rows) == number] for number in range(len(conditions))]
        mean, deviation = (np.array([of(group, axis=0) for group in groups]) for of in (np.mean, np.std))
        mean[:, :_SETTINGS], deviation[:, :_SETTINGS] = rows[:, :_SETTINGS].mean(0), rows[:, :_SETTINGS].std(0)
        return cls(conditions, mean, np.where(deviation < 1e-9, 1, deviation))

    def __call__(self, rows: Array) -> Array:
        """Scaled rows; what lies five deviations off or more is cut there."""
        which = _nearest(self.conditions, rows)
        scaled = (rows - self.mean[which]) / self.deviation[which]
        return np.clip(scaled, -_SPREAD, _SPREAD)


def _nearest(conditions: Array, rows: Array) -> NDArray[np.intp]:
    return np.argmin(np.square(rows[:, None, :_SETTINGS] - conditions).sum(2), axis=1)


def _pictures(settings: Split, source: Pictures, seed: int) -> Parts:
    order = generator(seed, "order of arrival").permutation(len(source.train))
    if settings.pool == "tuning":
        away = np.isin(order, _some(np.arange(len(order)), _HELD_OUT["cifar10"], seed))
        held_out = _quadrants(source.train[order[away]], source.train_labels[order[away]])
        order = order[~away]
    else:
        held_out = _quadrants(source.test, source.test_labels)
    return Parts(_quadrants(source.train[order], source.train_labels[order]), held_out)


def _quadrants(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Stream:
    """A sensor sees a quarter of every image: float32 [N, 3, 16, 16]."""
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32) / 127.5 - 1
    side = planes.shape[2] // 2
    places = [(row, column) for row in (0, side) for column in (0, side)]
    parts = (np.ascontiguousarray(planes[:, :, row : row + side, column : column + side]) for row, column in places)
    return Stream(tuple(map(torch.from_numpy, parts)), torch.from_numpy(labels.astype(np.int64)))


def _some(things: NDArray[np.generic], share: float, seed: int) -> NDArray[np.generic]:
    count = max(1, round(share * len(things)))
    return generator(seed, "held out").permutation(things)[:count]


def _text(folder: Path, name: str) -> str:
    try:
        if (plain := folder / name).exists():
            return plain.read_text()
        with gzip.open(folder / f"{name}.gz", "rt") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{folder} has no {name} (or {name}.gz) that can be read: {error}",
            "pass the folder of NASA's C-MAPSS files",
        ) from error


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def rows_of(source: Source) -> Iterator[int]:
    """How many samples a data set has for training and for the test."""
    if isinstance(source, Engines):
        yield from (len(_ends(rows, 15)) for rows in (source.train, source.test))
    else:
        yield from (len(source.train), len(source.test))
