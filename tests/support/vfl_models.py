"""A small trained run, and the bundles of its members."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from broker_config.security.kit import Kit
from edge_node.extensions.vfl.algorithm import Representation
from edge_node.extensions.vfl.line.sensor_rows import RowFile, Scaling
from edge_node.extensions.vfl.messages import Channel, Denoising, Recipe, VflSpec, Window
from edge_node.extensions.vfl.party_export import HeadBundleWriter, SensorBundleWriter
from edge_node.extensions.vfl.simulation import Simulation, Stream
from export.bundle_signing import Signer

COLUMNS = {"press": ("force", "speed"), "oven": ("heat",), "scale": ("mass", "tilt", "drift")}
RUN = "ab" * 8


def settings(**changes: object) -> VflSpec:
    given = {
        "federation": "steel",
        "run": RUN,
        "software": "test",
        "sensors": tuple(COLUMNS),
        "network": "dense",
        "classes": ("0", "1", "2", "3"),
        "window": Window(start=60, chunk=10),
        "recipe": Recipe(eta=0.3),
        "seed": 5,
    }
    return VflSpec(**(given | changes))


def rows(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What each sensor measures of so many products [count, columns], and labels:
    sensors know of one another.
    """
    random, plant = np.random.default_rng(seed), np.random.default_rng(1)
    hidden = random.normal(0, 1, (count, 2))
    measured = {
        name: hidden @ plant.normal(0, 1, (2, len(names))) * 20
        + 300
        + random.normal(0, 1, (count, len(names)))
        for name, names in COLUMNS.items()
    }
    labels = 2 * (hidden[:, 0] > 0) + (hidden[:, 1] > 0)
    return {name: values.astype(np.float32) for name, values in measured.items()}, labels


class TrainedRun:
    """A run that has played some rounds, with what its sensors scale by."""

    def __init__(self, rounds: int = 12, *, seed: int = 0, noise: bool = False, **changes: object):
        if noise:
            changes |= {"channel": Channel(sigma=0.2), "denoising": Denoising(rounds=4, epochs=25)}
        self.spec = settings(**changes)
        torch.set_num_threads(self.spec.threads)
        self.raw, labels = rows(60 + 10 * rounds, seed)
        self.scaling = {name: Scaling(each.mean(0), each.std(0)) for name, each in self.raw.items()}
        samples = tuple(self.scaled(name, self.raw[name]) for name in self.spec.sensors)
        self.simulation = Simulation(self.spec, Stream(samples, torch.from_numpy(labels)))
        for _ in range(rounds):
            self.simulation.step([2] * len(samples))

    def scaled(self, name: str, raw: np.ndarray) -> Tensor:
        """Samples [N, columns, 1] of rows [N, columns]."""
        return torch.from_numpy(
            ((raw - self.scaling[name].mean) / self.scaling[name].deviation)[..., None]
        )

    def embedded(self) -> list[Tensor]:
        """Each sensor's embeddings of all products, denoised."""
        samples = self.simulation.stream.samples
        received = [
            sensor.embed(each)
            for sensor, each in zip(self.simulation.sensors, samples, strict=True)
        ]
        return list(self.simulation.head.represent(received).embeddings)

    def write(
        self, folder: Path, kits: dict[str, Kit] | None = None, round_: int = 0
    ) -> dict[str, Path]:
        """The bundles of all members, by name."""
        members = [*self.spec.sensors, "coordinator"]
        signers = {name: Signer(kits[name], 90) if kits else None for name in members}
        round_ = round_ or self.simulation.round
        for sensor in self.simulation.sensors:
            about = RowFile(Path(), COLUMNS[sensor.name])
            made = SensorBundleWriter(folder / sensor.name, about, signers[sensor.name])
            made(self.spec, round_, sensor, self.scaling[sensor.name], last=True)
        head = HeadBundleWriter(folder / "coordinator", signers["coordinator"])
        head(self.spec, round_, self.simulation.head, self.embedded(), last=True)
        return {name: folder / name for name in members}

    def predicted(self, raw: dict[str, np.ndarray]) -> np.ndarray:
        """Probabilities [N, C] of rows that all sensors have, by torch;
        the channel adds nothing.
        """
        received = [
            sensor.embed(self.scaled(sensor.name, raw[sensor.name]))
            for sensor in self.simulation.sensors
        ]
        phi: Representation = self.simulation.head.represent(received)
        return torch.softmax(self.simulation.head.logits(phi.embeddings), 1).numpy()
