"""State of a federation's rounds: who takes part, and who has contributed."""

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from broker_config.protocol.messages import Stage


class Status(StrEnum):
    """Stage of a federation."""

    GATHERING = "gathering"
    OPEN = "open"
    # open to its nodes, who have nothing more to do in it but for the masks of their parts
    UNMASKING = "unmasking"
    FINISHED = "finished"


_STAGES: dict[Status, Stage] = {
    Status.GATHERING: "gathering",
    Status.OPEN: "open",
    Status.UNMASKING: "open",
    Status.FINISHED: "finished",
}


class Plan(NamedTuple):
    """Settings that are fixed before the first round."""

    nodes: int  # places
    quorum: int  # contributions without which no round closes
    rounds: int
    sample: int = 0  # nodes drawn for each round; 0: all take part
    seed: int = 0  # of the draw
    # rounds in which all take part, drawn or not: those for statistics
    of_all: frozenset[int] = frozenset()
    is_masked: bool = False  # only the sum of contributions can be read, once they are all there

    @property
    def opening(self) -> int:
        """Nodes that open the first round: a quorum, or all where some are drawn from all."""
        return self.nodes if self.sample else self.quorum


class Federation(NamedTuple):
    """The state. The sets hold node names."""

    plan: Plan
    status: Status = Status.GATHERING
    round: int = 0
    members: frozenset[str] = frozenset()  # who holds a place
    present: frozenset[str] = frozenset()
    drawn: frozenset[str] = frozenset()  # who takes part in the open round; empty: every member
    contributed: frozenset[str] = frozenset()
    expired: bool = False  # the open round's deadline is over
    paused: bool = False  # fewer than the quorum can contribute: the round waits for more
    held: bool = False  # the operator lets no round open or close

    @property
    def missing(self) -> frozenset[str]:
        """Nodes that are present and have yet to contribute to the open round."""
        return frozenset(node for node in self.present if self.takes_part(node)) - self.contributed

    def takes_part(self, node: str) -> bool:
        """Whether a member may contribute to the open round."""
        return not self.drawn or node in self.drawn

    @property
    def stage(self) -> Stage:
        """The status as nodes are told it."""
        return _STAGES[self.status]


def restore(
    plan: Plan,
    round_: int,
    members: Collection[str],
    drawn: Collection[str],
    contributed: Collection[str],
) -> Federation:
    """The state that a journal holds; to be followed by the event Started.

    Members count as present while a round is open: they have not left, it was the coordinator who
    was away.
    """
    everyone = frozenset(members)
    if round_ == 0:
        return Federation(plan, members=everyone)
    if round_ > plan.rounds:
        return Federation(plan, Status.FINISHED, plan.rounds, everyone)
    return Federation(
        plan, Status.OPEN, round_, everyone, everyone, frozenset(drawn), frozenset(contributed)
    )
