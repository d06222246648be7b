"""A cell of a grid: one federation to simulate, and what it reached. Its key is the hash of all that it depends on."""

import hashlib
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from broker_config.protocol.messages import Option, Training
from trainer.training.simulation import Device

Pool = Literal["report", "tuning"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How a data set is shared among nodes; the fields of `partition.Scheme` but for the seed."""

    dataset: str  # its name in tables
    images: str  # SHA-256 of the pairs (digest, class) of the catalogue: which images, not where they lie
    partition: str
    nodes: int = 5
    samples: int = 10
    classes_per_node: int = 2
    alpha: float = 0.1
    pool: Pool = "report"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One federation. With the same torch on the same machine, the same cell gives the same tensors."""

    setting: Setting
    method: str
    options: dict[str, Option]  # complete
    model: str
    weights: str  # SHA-256 of the first broadcast's encoder
    size: int  # pixels
    training: Training  # complete
    rounds: int
    seed: int
    torch: str  # version
    cuda: Literal[True] | UnsetType = UNSET  # trained on a GPU; unset, as in all results from before there was a choice

    @property
    def device(self) -> Device:
        """What trains its nodes."""
        return "cuda" if self.cuda else "cpu"

    @property
    def key(self) -> str:
        """What the result is found by."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one node reached after the last round, on its held-out images; shares in 0..1."""

    name: str
    trained: dict[str, int]  # training images of each of its classes
    tested: int  # held-out images
    accuracy: float
    f1: float  # macro, over its own classes
    history: dict[str, list[float | None]]  # of each metric: a value a round, None where it was not measured


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell: a line of the store."""

    key: str
    cell: Cell
    nodes: list[NodeResult]
    seconds: float
    machine: str  # processor or accelerator: times compare within one machine only

    def mean(self, figure: Literal["accuracy", "f1"]) -> float:
        """Mean over the nodes."""
        return sum(float(getattr(node, figure)) for node in self.nodes) / len(self.nodes)
