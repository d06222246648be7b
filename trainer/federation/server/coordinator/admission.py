"""Admission of a contribution to a round: whether it is due, early or late."""

from enum import StrEnum

from trainer.federation.server.coordinator.round_state import Federation, Status


class Admission(StrEnum):
    """Classification of a contribution on arrival."""

    DUE = "due"
    COUNTED = "counted"  # of a node whose contribution to the open round is summed already
    LATE = "late"  # to a closed round: never summed, since the result would depend on delays
    EARLY = "early"  # to a round that is not open
    NOT_DRAWN = "not drawn"


def classify(state: Federation, node: str, round_: int) -> Admission:
    """Classify a member's contribution to a round at this moment."""
    if state.status is Status.FINISHED or round_ < state.round:
        return Admission.LATE
    if state.status is Status.GATHERING or round_ > state.round:
        return Admission.EARLY
    if node in state.contributed:
        return Admission.COUNTED
    if state.status is Status.UNMASKING:
        return Admission.LATE
    if state.takes_part(node):
        return Admission.DUE
    # its masks are not among the others'
    return Admission.LATE if state.plan.is_masked else Admission.NOT_DRAWN
