"""Cells of a grid, each with a key that hashes all that its result depends on."""

import hashlib
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from broker_config.protocol.messages import Option, Training
from trainer.federation.simulation import Device

S = TypeVar("S", bound=msgspec.Struct)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A run. With the same torch on the same machine, the same cell gives the same numbers."""

    @property
    def key(self) -> str:
        """The name of its result in a store."""
        return _hash(msgspec.json.encode(self, order="deterministic"))


class FederationCell(Cell, Generic[S], frozen=True, kw_only=True):
    """A federation that is simulated."""

    setting: S  # how a data set is shared among nodes
    method: str
    options: dict[str, Option]  # complete
    model: str
    weights: str  # what the first encoder is made from: a digest, none or imagenet
    size: int  # pixels
    training: Training  # complete
    rounds: int
    seed: int
    torch: str  # version
    # trained on a GPU; unset, as in all results from before there was a choice
    cuda: Literal[True] | UnsetType = UNSET

    @property
    def key(self) -> str:
        """As before there was a choice of the optimiser, where it is Adam."""
        return _hash(
            msgspec.json.encode(self, order="deterministic").replace(b',"optimizer":"adam"', b"")
        )

    @property
    def device(self) -> Device:
        """Where its nodes train."""
        return "cuda" if self.cuda else "cpu"


def _hash(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:16]


class Finished(Protocol):
    """The result of a cell: a line of a store."""

    @property
    def key(self) -> str:
        """The cell's key."""
        ...

    @property
    def cell(self) -> Any:
        """What was run."""
        ...

    @property
    def seconds(self) -> float:
        """How long the run took."""
        ...

    @property
    def machine(self) -> str:
        """Processor or accelerator: times compare within one machine only."""
        ...
