"""A cell of a grid: one federation to simulate, and what it reached."""

import math
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from broker_config.protocol.messages import Codec
from research.runner.cell import FederationCell
from research.runner.tuning import Pool

Metric = Literal["accuracy", "f1", "own", "everyone"]  # of `NodeResult`


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How a data set is shared among nodes; fields and options of `partition.Scheme` but for the
    seed.
    """

    dataset: str  # its name in tables
    # SHA-256 of the pairs (digest, class) of the catalogue: which images, not where they lie
    images: str
    partition: str
    nodes: int = 5
    samples: int = 10
    classes_per_node: int = 2
    alpha: float = 0.1
    pool: Pool = "report"


class Cell(FederationCell[Setting], frozen=True, kw_only=True):
    """One federation; `weights` is the SHA-256 of the first broadcast's encoder."""

    head: Literal["statistics"] | UnsetType = UNSET  # unset: the classifier that the method trains
    # all nodes' training images in one place: what sharing them would give
    pooled: Literal[True] | UnsetType = UNSET
    # unset: none, as in all results from before there was a choice
    codec: Codec | UnsetType = UNSET
    privacy: dict[str, str] | UnsetType = UNSET  # as `--privacy` takes it; unset: none
    # whether features of held-out images are projected to two dimensions
    embed: Literal[True] | UnsetType = UNSET


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one node reached after the last round, on its held-out images; shares in 0..1."""

    name: str
    trained: dict[str, int]  # training images of each of its classes
    tested: int  # held-out images
    accuracy: float  # all classes being candidates
    f1: float  # macro, over its own classes; likewise
    # Since both views are told; unset in results from before.
    own: float | UnsetType = UNSET  # accuracy where only its own classes are candidates
    # accuracy on the held-out images of all nodes, all classes being candidates
    everyone: float | UnsetType = UNSET
    labels: bytes | UnsetType = UNSET  # uint8 [tested]: class of each held-out image, by alphabet
    # float16 [tested, classes] for the same images, row by row
    log_probabilities: bytes | UnsetType = UNSET
    # of each metric: a value a round, None where it was not measured
    history: dict[str, list[float | None]]


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Features of a node's held-out images in two dimensions, and their classes."""

    node: str
    labels: list[str]
    points: list[tuple[float, float]]


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell: a line of the store."""

    key: str
    cell: Cell
    nodes: list[NodeResult]
    embeddings: list[Embedding] | UnsetType = UNSET  # where the cell asks for them
    # that a node sent and received, where there is a codec
    bytes: tuple[int, int] | UnsetType = UNSET
    seconds: float
    machine: str  # processor or accelerator: times compare within one machine only

    def mean(self, metric: Metric) -> float:
        """Mean over the nodes; NaN if a node's result lacks it."""
        values = [getattr(node, metric) for node in self.nodes]
        return math.nan if UNSET in values else sum(values) / len(values)
