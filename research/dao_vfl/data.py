"""The two data sets of the paper as streams of products: C-MAPSS
(there FD002) for two sensors, CIFAR-10 for four.

Readings of C-MAPSS differ more between the six operating conditions than over an engine's life, so
that they are scaled by condition. The scales are those of the first set: a federation that starts
to learn knows no more. An operating condition is what the plant sets, known to both sensors.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl import cmapss
from edge_node.extensions.vfl.cmapss import Engines
from edge_node.extensions.vfl.simulation import Stream
from research.runner.tuning import Pool
from trainer.seeding import generator

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

_SETTINGS = 3  # columns before the readings
_SPREAD = 5.0  # scaled readings end there
_HELD_OUT_ENGINES, _HELD_OUT_IMAGES = 0.2, 0.1  # of those for training, while tuning
SUBSETS = {
    "cmapss": "FD002",
    "cmapss_fd001": "FD001",
    "cmapss_fd003": "FD003",
    "cmapss_fd004": "FD004",
}
"""NASA's sets of engines by the data set's name."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How a data set becomes a stream and held-out products."""

    data: str  # one of SUBSETS, or cifar10
    digest: str  # of the files' content
    # report: the test file is held out; tuning: engines (images) of the training file, by seed
    pool: Pool = "report"
    scaling: Literal["condition", "global"] = "condition"
    # of arrival: engine by engine in time, or all samples shuffled
    order: Literal["engines", "mixed"] = "engines"


class Turbofans(NamedTuple):
    """A set of C-MAPSS."""

    train: Engines  # until they fail
    test: Engines  # until some time before


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


Source = Turbofans | Pictures


class Inputs(NamedTuple):
    """What some cells need, free of paths."""

    sources: Mapping[str, Source]  # by `Split.digest`
    agents: Mapping[str, bytes] = {}  # trained policies by digest


def read(name: str, path: Path) -> tuple[str, Source]:
    """The digest and content of a data set: a folder of C-MAPSS, or an NPZ file of CIFAR-10.

    Raises:
        UsageError: it is not there, or something else.
    """
    if name in SUBSETS:
        train, test, lives = (
            _file(path, f"{part}_{SUBSETS[name]}.txt") for part in ("train", "test", "RUL")
        )
        found = Turbofans(cmapss.load_engines(train), cmapss.load_engines(test, lives))
        return _digest(found.train) + _digest(found.test), found
    try:
        with np.load(path, allow_pickle=False) as file:
            pictures = Pictures(
                *(
                    file[key]
                    for key in ("train_images", "train_labels", "test_images", "test_labels")
                )
            )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} cannot be read as CIFAR-10: {error}",
            "pass an NPZ file with train_images, train_labels, test_images and test_labels",
        ) from error
    return _digest(pictures), pictures


def split(settings: Split, source: Source, seed: int, first: int) -> Parts:
    """Stream and held-out products of a seed; `first` is the size of the first set,
    which scales are fitted to.
    """
    if isinstance(source, Turbofans):
        return _turbofans(settings, source, seed, first)
    return _pictures(settings, source, seed)


def counts(source: Source) -> tuple[int, int]:
    """How many samples a data set has for training and for the test."""
    if isinstance(source, Turbofans):
        return len(source.train.labelled()), len(source.test.labelled())
    return len(source.train), len(source.test)


def _turbofans(settings: Split, source: Turbofans, seed: int, first: int) -> Parts:
    train, other = source.train, source.test
    kept, held_out = train.labelled(), other.labelled()
    if settings.pool == "tuning":
        away = np.isin(train.engine[kept], _some(np.unique(train.engine), _HELD_OUT_ENGINES, seed))
        kept, held_out, other = kept[~away], kept[away], train
    arriving = _arrival(settings, train, kept, seed)
    scale = Scale.fit(train.values[arriving[:first]], by_condition=settings.scaling == "condition")
    return Parts(_windows(scale, train, arriving), _windows(scale, other, held_out))


def _arrival(settings: Split, engines: Engines, rows: Rows, seed: int) -> Rows:
    random = generator(seed, "order of arrival")
    if settings.order == "mixed":
        return np.asarray(random.permutation(rows), np.int64)
    places = random.permutation(int(engines.engine.max()) + 1)  # of each engine
    return rows[np.argsort(places[engines.engine[rows]], kind="stable")]


def _windows(scale: "Scale", engines: Engines, rows: Rows) -> Stream:
    """The samples that end in these rows, float32 [N, 12, 15] of each of two sensors."""
    scaled = engines._replace(values=scale(engines.values))
    samples = (
        torch.from_numpy(scaled.samples(rows, columns)) for columns in cmapss.SENSORS.values()
    )
    return Stream(tuple(samples), torch.from_numpy(engines.life[rows]))


class Scale(NamedTuple):
    """Mean and deviation of each column, by operating condition."""

    conditions: Floats  # [C, 3] settings
    mean: Floats  # [C, columns]
    deviation: Floats  # [C, columns]

    @classmethod
    def fit(cls, rows: Floats, *, by_condition: bool) -> "Scale":
        """To rows [N, columns] whose first three are the settings,
        which are always scaled as a whole.
        """
        settings = (
            np.round(rows[:, :_SETTINGS]) if by_condition else np.zeros((1, _SETTINGS), np.float32)
        )
        conditions = np.unique(settings, axis=0)
        groups = [rows[_nearest(conditions, rows) == number] for number in range(len(conditions))]
        mean, deviation = (
            np.array([of(group, axis=0, dtype=np.float64) for group in groups])
            for of in (np.mean, np.std)
        )
        mean[:, :_SETTINGS], deviation[:, :_SETTINGS] = (
            rows[:, :_SETTINGS].mean(0),
            rows[:, :_SETTINGS].std(0),
        )
        # the column is constant, but for rounding
        deviation[deviation < 1e-4 * np.abs(mean) + 1e-9] = 1
        return cls(conditions, mean.astype(np.float32), deviation.astype(np.float32))

    def __call__(self, rows: Floats) -> Floats:
        """Scaled rows; what lies five deviations off or more is cut there."""
        which = _nearest(self.conditions, rows)
        scaled = (rows - self.mean[which]) / self.deviation[which]
        return np.asarray(np.clip(scaled, -_SPREAD, _SPREAD), np.float32)


def _nearest(conditions: Floats, rows: Floats) -> NDArray[np.intp]:
    return np.asarray(np.square(rows[:, None, :_SETTINGS] - conditions).sum(2).argmin(1))


def _pictures(settings: Split, source: Pictures, seed: int) -> Parts:
    order = generator(seed, "order of arrival").permutation(len(source.train))
    if settings.pool == "tuning":
        away = np.isin(order, _some(np.arange(len(order)), _HELD_OUT_IMAGES, seed))
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
    parts = (
        np.ascontiguousarray(planes[:, :, row : row + side, column : column + side])
        for row, column in places
    )
    return Stream(tuple(map(torch.from_numpy, parts)), torch.from_numpy(labels.astype(np.int64)))


def _some(things: NDArray[np.generic], share: float, seed: int) -> NDArray[np.generic]:
    count = max(1, round(share * len(things)))
    return generator(seed, "held out").permutation(things)[:count]


def _file(folder: Path, name: str) -> Path:
    names = [folder / f"{name}{ending}" for ending in ("", ".gz")]
    found = next((name for name in names if name.exists()), None)
    if found is None:
        raise UsageError(
            f"{folder} has no {names[0].name} and no {names[1].name}",
            "pass the folder of NASA's files",
        )
    return found


def _digest(arrays: NamedTuple) -> str:
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:16]
