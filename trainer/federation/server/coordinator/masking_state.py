"""State of the masks of a coordinator's open round."""

from collections.abc import Mapping
from typing import NamedTuple

from broker_config.protocol.messages import PublicKeys


class Masking(NamedTuple):
    """The state. Mappings are by the name of the node that has said it."""

    run: str
    threshold: int
    neighbours: int
    round: int = 0
    keys: Mapping[str, PublicKeys] = {}  # so far; or of the cohort
    is_gathered: bool = False  # the cohort is fixed
    shares: Mapping[str, Mapping[str, str]] = {}  # by sender, then by receiver
    is_shared: bool = False  # whose masks count is fixed: those who have sent shares
    survivors: tuple[str, ...] = ()
    signed: Mapping[str, str] = {}
    agreed: Mapping[str, str] = {}  # the signatures that are shown
    revealed: Mapping[str, Mapping[str, str]] = {}
    tried: int = 0  # with what so many nodes have revealed the masks did not go away


class Facts(NamedTuple):
    """What is on disk of the open round; what is empty has not come so far."""

    cohort: Mapping[str, PublicKeys] = {}
    shares: Mapping[str, Mapping[str, str]] = {}
    survivors: tuple[str, ...] = ()
    agreed: Mapping[str, str] = {}


def restore(run: str, threshold: int, neighbours: int, round_: int, facts: Facts) -> Masking:
    """The state of a process that goes on with the open round."""
    return Masking(
        run,
        threshold,
        neighbours,
        round_,
        facts.cohort,
        bool(facts.cohort),
        facts.shares,
        bool(facts.shares),
        facts.survivors,
        agreed=facts.agreed,
    )
