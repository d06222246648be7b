"""State of a federation's coordinator."""

from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.messages import Spec
from trainer.federation.server.coordinator.masking_state import Masking
from trainer.federation.server.coordinator.round_state import Federation, Status


class ProcessPlan(NamedTuple):
    """What does not change while the process lasts."""

    spec: Spec
    session: str  # of this process
    folder: Path  # of the ledger
    linger: float  # seconds for absent nodes to come back, and for newcomers
    # the run had finished before, and its result is of use to others
    serves_newcomers: bool = False


class Coordination(NamedTuple):
    """The state. The sets hold node names; times are seconds of any monotonic clock."""

    plan: ProcessPlan
    rounds: Federation
    now: float = 0.0
    # no members any more, or refused: not waited for at the end
    excluded: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()  # by the operator: they are not let in again
    # they are fetching the result without having been in the run
    newcomers: frozenset[str] = frozenset()
    # the broker knows of a later end than the ledger: nodes have gone that are needed
    was_over: bool = False
    opened: float = 0.0  # the open round
    joined: float = 0.0  # when a node did last
    # when the last node left of those that still want the result
    lingering_since: float | None = None
    is_over: bool = False  # the coordinator may go
    masking: Masking | None = None  # where contributions are masked

    @property
    def is_finished(self) -> bool:
        """Whether the last round is closed."""
        return self.rounds.status is Status.FINISHED

    @property
    def present(self) -> frozenset[str]:
        """Nodes that are connected, as far as is known."""
        return self.rounds.present | self.newcomers

    def is_newcomer(self, node: str) -> bool:
        """Whether a node comes for the result of a run that it was not in."""
        return (
            self.is_finished and bool(self.plan.spec.statistics) and node not in self.rounds.members
        )
