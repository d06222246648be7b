"""Drawn products of stations whose sensors see the same ones,
for trials before a plant has files of its own.

Each product has two hidden properties at each station; a share of them comes from its material. Its
class depends on several stations together. Columns look physical, and drift: tools wear until they
are changed, a day is warm and cold.
"""

import csv
import io
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError
from trainer.seeding import generator

CLASSES = ("ok", "burr", "crack", "warp")
LABELS = "labels.csv"
_SHARED = 0.6  # correlation of a property with the material's
_NOISE = 0.15  # of a column, in deviations of what it measures
# products until tools are changed, and in a day
_WEAR = 700
_DAY = 1900
_BLOCK = 256  # products drawn with the same random numbers, whoever asks for which of them


class Column(NamedTuple):
    """What a sensor measures: typical value and deviation, in its unit."""

    name: str
    typical: float
    deviation: float


def _columns(text: str) -> tuple[Column, ...]:
    return tuple(
        Column(name, float(typical), float(deviation))
        for name, typical, deviation in map(str.split, text.split(","))
    )


STATIONS = {
    "press": _columns("force_kn 412 9, speed_mm_s 31 1.2, die_c 86 4, path_mm 12.4 0.05"),
    "oven": _columns("air_c 184 3.5, pressure_mbar 1012 6, humidity 0.22 0.03, dwell_s 95 2"),
    "spindle": _columns(
        "torque_nm 7.4 0.6, current_a 3.1 0.2, vibration_mm_s 1.9 0.4, bearing_c 47 2"
    ),
    "welder": _columns("current_ka 8.6 0.3, voltage_v 1.9 0.1, tip_c 310 14, force_n 2400 70"),
    "washer": _columns("bath_c 58 1.5, ph 9.2 0.2, flow_l_min 41 2, jet_bar 4.2 0.3"),
    "gauge": _columns("height_mm 40.02 0.01, runout_um 11 3, roughness_um 0.8 0.1, mass_g 312 0.7"),
}


class Products(NamedTuple):
    """Some products in the order of their arrival."""

    names: tuple[str, ...]
    rows: tuple[NDArray[np.float64], ...]  # of each station [n, columns]
    labels: NDArray[np.int64]  # [n]


class DrawnStations:
    """The first so many of STATIONS; all that they measure follows from the seed alone."""

    def __init__(self, stations: int, seed: int):
        if not 2 <= stations <= len(STATIONS):
            raise UsageError(
                f"products cannot be drawn for {stations} stations", f"take 2 to {len(STATIONS)}"
            )
        self.stations = {name: STATIONS[name] for name in list(STATIONS)[:stations]}
        self.classes = CLASSES
        self._seed = seed
        random = generator(seed, "drawn line")
        self._views = random.normal(0, 1, (stations, 2, 4))  # how columns hang on properties
        self._wear = random.normal(0, 0.2, (stations, 4))
        causes = random.normal(0, 1, (len(CLASSES), stations, 2))
        # each station says as much
        self._causes = causes / np.linalg.norm(causes, axis=2, keepdims=True)

    def draw(self, first: int, last: int) -> Products:
        """Products [first, last) of all that will ever be."""
        blocks = [self._block(each) for each in range(first // _BLOCK, -(-last // _BLOCK))]
        rows, labels = (np.concatenate(each) for each in zip(*blocks, strict=True))
        part = slice(first % _BLOCK, first % _BLOCK + last - first)
        names = tuple(f"P{number:06}" for number in range(first, last))
        return Products(names, tuple(rows[part].transpose(1, 0, 2)), labels[part])

    def _block(self, block: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        random = generator(self._seed, "products", block)
        count = len(self.stations)
        material = random.normal(size=(_BLOCK, 1, 2))
        own = random.normal(size=(_BLOCK, count, 2))
        properties = np.sqrt(_SHARED) * material + np.sqrt(1 - _SHARED) * own  # [n, stations, 2]
        labels = np.einsum("nkp,ckp->nc", properties, self._causes).argmax(1)
        number = np.arange(block * _BLOCK, (block + 1) * _BLOCK)[:, None, None]
        drift = self._wear * (number % _WEAR / _WEAR + np.sin(2 * np.pi * number / _DAY))
        seen = np.einsum("nkp,kpc->nkc", properties, self._views) + drift
        seen += random.normal(0, _NOISE, seen.shape)
        stations = []
        for station in self.stations.values():
            stations.append([(each.typical, each.deviation) for each in station])
        columns = np.array(stations)
        return columns[..., 0] + columns[..., 1] * seen, labels


def append_products(drawn: DrawnStations, folder: Path, first: int, last: int) -> None:
    """Append products to `STATION.csv` of each station and then to `labels.csv`;
    files that are not there begin.
    """
    folder.mkdir(parents=True, exist_ok=True)
    products = drawn.draw(first, last)
    for station in drawn.stations:
        append_rows(drawn, folder, products, station)
    found = (
        [name, CLASSES[label]] for name, label in zip(products.names, products.labels, strict=True)
    )
    _append(folder / LABELS, ["product", "label"], found)


def append_rows(drawn: DrawnStations, folder: Path, products: Products, station: str) -> None:
    """Append what one station has measured of products to its file."""
    rows = products.rows[list(drawn.stations).index(station)]
    cells = []
    for name, row in zip(products.names, rows, strict=True):
        cells.append([name, *(f"{value:.6g}" for value in row)])
    _append(
        folder / f"{station}.csv",
        ["product", *(column.name for column in drawn.stations[station])],
        cells,
    )


def count_labelled(folder: Path) -> int:
    """Products that are labelled in a folder."""
    path = folder / LABELS
    return sum(1 for _ in path.open()) - 1 if path.exists() else 0


def append_at_rate(
    drawn: DrawnStations, folder: Path, products: range, rate: float, stop: Callable[[], bool]
) -> int:
    """Append products at so many a second until they are through or `stop` says so;
    return how many there were.
    """
    begun = time.monotonic()
    written = 0
    while written < len(products) and not stop():
        due = min(len(products), int((time.monotonic() - begun) * rate) + 1)
        if due > written:
            append_products(drawn, folder, products.start + written, products.start + due)
            written = due
        time.sleep(min(0.1, 1 / rate))
    return written


def _append(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """In one write: who reads at the same time sees whole lines."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not path.exists():
        writer.writerow(header)
    writer.writerows(rows)
    with path.open("a") as file:
        file.write(text.getvalue())
