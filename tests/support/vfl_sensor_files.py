"""VFL runs for tests: what sensors measure, as files that grow; their processes;
the same run simulated.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from edge_node.extensions.vfl.line.sensor_rows import RowFile, Samples
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.server.labels import Labels
from edge_node.extensions.vfl.simulation import Simulation, Stream
from tests.support.plants import Process, start

CLASSES = ("good", "worn", "broken")
COLUMNS = ("force", "speed", "heat")


class Plant:
    """The data of a run in `folder`: SENSOR.csv for each sensor,
    each with other features; labels.csv for the head.
    """

    def __init__(self, folder: Path, sensors: Sequence[str], seed: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.sensors, self.products = folder, tuple(sensors), 0
        self._random = np.random.default_rng(seed)
        self._views = self._random.normal(size=(len(sensors), 4, len(COLUMNS)))
        self._cuts = self._random.normal(size=4)
        self._files = {name: self.rows(name).open("w") for name in sensors}
        for file in self._files.values():
            print("product", *COLUMNS, sep=",", file=file, flush=True)
        self._labels = self.labels.open("w")
        print("product,label", file=self._labels, flush=True)

    def rows(self, sensor: str) -> Path:
        """The sensor's file."""
        return self.folder / f"{sensor}.csv"

    @property
    def labels(self) -> Path:
        """The head's file."""
        return self.folder / "labels.csv"

    def feed(self, count: int) -> None:
        """So many products more; their labels last, since the head asks for what it knows."""
        hidden = self._random.normal(size=(count, 4))
        ids = [f"p{self.products + number}" for number in range(count)]
        for file, view in zip(self._files.values(), self._views, strict=True):
            seen = hidden @ view + self._random.normal(0, 0.1, (count, len(COLUMNS)))
            lines = (
                f"{name},{','.join(f'{each:.5g}' for each in row)}\n"
                for name, row in zip(ids, seen, strict=True)
            )
            file.writelines(lines)
            file.flush()
        scores = np.digitize(hidden @ self._cuts, (-0.8, 0.8))
        self._labels.writelines(
            f"{name},{CLASSES[score]}\n" for name, score in zip(ids, scores, strict=True)
        )
        self._labels.flush()
        self.products += count

    def close(self) -> None:
        """No more products."""
        for file in (*self._files.values(), self._labels):
            file.close()


class Processes:
    """The `edge-node` processes of a run in `folder`: its head and its sensors.

    `settings` are options of `vfl coordinate`; `kits` are each member's file and passphrase.
    """

    def __init__(
        self,
        folder: Path,
        plant: Plant,
        url: str,
        settings: Mapping[str, object],
        *,
        kits: Mapping[str, tuple[Path, str]] | None = None,
    ):
        self.folder, self._plant, self._kits = folder, plant, kits or {}
        self._address = [] if kits else [url]
        self._settings = [str(each) for option in settings.items() for each in option]

    def head(self) -> Process:
        """Start it."""
        return self._start("coordinator")

    def sensor(self, name: str) -> Process:
        """Start it."""
        return self._start(name)

    def words(self, name: str) -> list[object]:
        """What comes after `edge-node` for `coordinator` or a sensor."""
        if name == "coordinator":
            sensors = ",".join(self._plant.sensors)
            its = [
                "coordinate",
                "--labels",
                self._plant.labels,
                "--sensors",
                sensors,
                "--classes",
                ",".join(CLASSES),
            ]
            its += self._settings
        else:
            its = ["join", "--columns", ",".join(COLUMNS), "--data", self._plant.rows(name)]
            its += [] if self._kits else ["--sensor", name]
        kit = ["--kit", self._kits[name][0]] if self._kits else []
        return ["vfl", *its, *self._address, "--state", self.state(name), "--json", *kit]

    def state(self, name: str) -> Path:
        """Its state folder."""
        return self.folder / f"state-{name}"

    def log(self, name: str) -> Path:
        """What it has said in its present life."""
        return self.folder / f"{name}.log"

    def _start(self, name: str) -> Process:
        passphrase = {"EDGE_NODE_PASSPHRASE": self._kits[name][1]} if self._kits else {}
        return start(
            *self.words(name), log=self.log(name), anew=False, OMP_NUM_THREADS="1", **passphrase
        )


def simulated(spec: VflSpec, plant: Plant) -> Simulation:
    """The run in this process, with the plant's products so far."""
    labels = Labels(plant.labels, spec.classes)
    labels.refresh()
    products = labels.products(0, labels.count)
    streams = []
    for name in spec.sensors:
        samples = Samples(RowFile(plant.rows(name), COLUMNS), spec.cycles)
        samples.refresh()
        samples.fit_scaling(products[: spec.window.start])
        streams.append(torch.from_numpy(samples.get(products)[0]))
    return Simulation(
        spec, Stream(tuple(streams), torch.from_numpy(labels.labels(0, labels.count)))
    )
