"""A cell: one federation of texture networks, and what its shared model reached."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from research.runner.cell import FederationCell
from research.runner.tuning import Pool


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How a data set's sources are shared among nodes;
    fields and options of `partition.Scheme` but for the seed.
    """

    data: str  # of `data.DATASETS`
    images: str  # SHA-256 of the triples (source, digest, class): which images, not where they lie
    partition: str  # groups: label skew; sources: feature skew; sources_groups: both
    classes_per_node: int  # #C; 0 with `sources`
    nodes: int
    samples: int  # training images of each node
    test_samples: int  # held-out images of each node at most
    shared: int = 0  # images of each class that every node gets besides (Data Sharing)
    pool: Pool = "report"


class Cell(FederationCell[Setting], frozen=True, kw_only=True):
    """One federation; `weights` is none, imagenet,
    or the SHA-256 of the file that the encoder is made from.
    """

    embed: bool = False  # whether features are projected to two dimensions
    head: Literal["statistics"] | UnsetType = UNSET  # unset: the classifier that the method trains


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A round: training in it, and the shared model after it on all nodes' held-out images;
    shares in 0..1.
    """

    round: int
    accuracy: float
    f1: float  # macro
    auc: float  # macro, one class against the rest
    loss: float  # cross-entropy of training, in the last local epoch, mean over nodes


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """The model that one node serves, after the last round, on its own held-out images."""

    name: str
    trained: dict[str, int]  # training images of each of its classes
    tested: int  # held-out images
    accuracy: float
    f1: float  # macro, over its own classes


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Features of all nodes' held-out images by the last shared model, in two dimensions
    (Fig. 9).
    """

    sources: list[str]  # of each image
    labels: list[str]
    points: list[tuple[float, float]]


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell: a line of the store."""

    key: str
    cell: Cell
    classes: list[str]
    curve: list[Point]  # every round; empty where no classifier is shared
    # after the last round: held-out images by class (row) and prediction; empty likewise
    confusion: list[list[int]]
    nodes: list[Node]
    embedding: Embedding | None = None  # where the cell asks for it
    # accuracy of each node's consensus head, if it has one; on all images
    heads: list[float] | UnsetType = UNSET
    seconds: float
    machine: str  # processor: times compare within one machine only

    @property
    def accuracy(self) -> float:
        """On all held-out images: of nodes' consensus heads in the mean,
        or else of the last shared model.

        Where no classifier is shared, `personal`.
        """
        if self.heads:
            return sum(self.heads) / len(self.heads)
        return self.curve[-1].accuracy if self.curve else self.personal

    @property
    def personal(self) -> float:
        """Accuracy of the models that nodes serve, each on its own held-out images:
        the mean over nodes.
        """
        return sum(node.accuracy for node in self.nodes) / len(self.nodes)
