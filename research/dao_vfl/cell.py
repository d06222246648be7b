"""A cell: one vertical federation, or its reference, and what it reached."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from edge_node.extensions.vfl.messages import Channel, Denoising, Recipe, Window
from research.dao_vfl.data import Split
from research.runner import cell

Kind = Literal["line", "central", "offline"]


class Cell(cell.Cell, frozen=True, kw_only=True):
    """One vertical federation, or what it is compared with."""

    # central: one graph, the same steps; offline: a proxy of the best fixed model
    kind: Kind = "line"
    split: Split
    network: str
    window: Window
    recipe: Recipe
    channel: Channel = Channel()
    denoising: Denoising = Denoising()
    iterations: tuple[int, ...]  # E_k of each sensor in every round; with a policy the most
    head_iterations: int | UnsetType = UNSET  # unset: as many as the busiest sensor takes
    policy: str = ""  # decides within that, from simulated timings: a rule, or `agent DIGEST`
    rounds: int
    every: int  # rounds from one measurement to the next
    seed: int
    torch: str  # version


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement on held-out products; None where a number is not finite, or has no meaning."""

    round: int
    loss: float | None  # cross-entropy
    accuracy: float
    rmse: float | None = None  # of the expectation over classes that are numbers
    rmse_likeliest: float | None = None  # of the likeliest class


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell: a line of the store."""

    key: str
    cell: Cell
    curve: list[Point]
    losses: list[float | None]  # F_t at Theta^{t,0} of every round, as the head sees it
    diverged: int = 0  # the round in which numbers ceased to be finite; it was the last one
    latency: list[float] = []  # seconds of every round, where a policy decides
    disparity: list[float] = []  # of its local iterations, likewise
    seconds: float
    machine: str  # processor: times compare within one machine only

    @property
    def last(self) -> Point | None:
        """After the last round; None if it was not reached."""
        return None if self.diverged else self.curve[-1]
