"""State machine of the masks of a coordinator's open round: (state, event) -> (state, effects).

Pure.

Keys, shares, contributions, agreement, shares of what was revealed: each step ends as a round does,
when all have answered, or enough. What a step has come to is on disk before anybody is told it;
what nodes answer to the newest one they answer again, so that of an answer nothing has to be kept.
"""

from collections.abc import Set

from broker_config.protocol.errors import PeerError
from broker_config.protocol.messages import MaskingAnswer, MaskingStep, PublicKeys
from trainer.federation.masking import count_neighbours, scarce_classes
from trainer.federation.server.coordinator import round_machine as rounds
from trainer.federation.server.coordinator.effects import (
    Forgotten,
    RecordMasks,
    Refuse,
    Say,
    Scarce,
    Unmask,
    Unreadable,
)
from trainer.federation.server.coordinator.events import Narrowed
from trainer.federation.server.coordinator.masking_state import Facts, Masking
from trainer.federation.server.coordinator.round_state import Federation, Status

MaskingEffect = RecordMasks | Say | Unmask | Refuse | Narrowed | Scarce | Unreadable | Forgotten
"""`Narrowed` is an event of the rounds: the coordinator's machine hands it to theirs."""
Step = tuple[Masking, list[MaskingEffect]]


def hear(state: Masking, node: str, answer: MaskingAnswer) -> Step:
    """Take in what a member says of the open round's masks. Signatures in it are the node's."""
    if answer.round != state.round:
        return state, []
    if answer.keys:
        return _hear_keys(state, node, answer.keys)
    if answer.shares and state.is_gathered and not state.is_shared and node in state.keys:
        count = count_neighbours(state.neighbours, len(state.keys))
        if not answer.shares.keys() <= state.keys.keys() - {node} or len(answer.shares) != count:
            return state, [
                Refuse(
                    PeerError(
                        node, "its shares are not for the other nodes of the round", state.round
                    )
                )
            ]
        return state._replace(shares={**state.shares, node: answer.shares}), []
    if answer.signature and node in state.survivors and not state.agreed:
        return state._replace(signed={**state.signed, node: answer.signature}), []
    if answer.revealed and node in state.survivors and state.agreed:
        if not answer.revealed.keys() <= {node, *_shares_for(state, node)}:
            return state, [
                Refuse(PeerError(node, "it reveals shares that it does not hold", state.round))
            ]
        return state._replace(revealed={**state.revealed, node: answer.revealed}), []
    return state, []


def _hear_keys(state: Masking, node: str, keys: PublicKeys) -> Step:
    """A node begins the round, or is back: it is told all that it may have missed."""
    if not state.is_gathered:
        return state._replace(keys={**state.keys, node: keys}), []
    if node not in state.keys:
        return state, []  # it came too late: the round goes on without it
    if state.keys[node] != keys:
        return state, [Forgotten(node)]
    told: list[MaskingEffect] = [Say(node, _say(state, members=dict(state.keys)))]
    if node in state.shares and state.is_shared:
        told.append(Say(node, _tell_shares(state, node)))
    if node in state.survivors:
        told.append(Say(node, _say(state, survivors=state.survivors)))
        told += [Say(node, _say(state, signatures=dict(state.agreed)))] if state.agreed else []
    return state, told


def forget(state: Masking, node: str) -> Masking:
    """The state once a node has no part in the run any more.

    Its keys stay in a cohort that was told.
    """
    kept = {name: keys for name, keys in state.keys.items() if name != node or state.is_gathered}
    shares = {name: each for name, each in state.shares.items() if name != node or state.is_shared}
    return state._replace(keys=kept, shares=shares)


def settle(state: Masking, federation: Federation) -> Step:
    """Go on with the open round's masks as far as that is due."""
    effects: list[MaskingEffect] = []
    if federation.status not in (Status.OPEN, Status.UNMASKING):
        return state, effects
    if federation.round != state.round:
        state = Masking(state.run, state.threshold, state.neighbours, federation.round)
    for due in (_gather, _exchange, _name_survivors, _agree, _read):
        state, more = due(state, federation)
        effects += more
    return state, effects


def _gather(state: Masking, federation: Federation) -> Step:
    plan = federation.plan
    # some places may stay free
    most = len(federation.members) if federation.round in plan.of_all else plan.nodes
    if state.is_gathered or not rounds.is_enough(
        federation, state.keys.keys(), federation.present, most
    ):
        return state, []
    state = state._replace(is_gathered=True)
    told = [Say(node, _say(state, members=dict(state.keys))) for node in sorted(state.keys)]
    return state, [RecordMasks(_facts(state)), *told]


def _exchange(state: Masking, federation: Federation) -> Step:
    cohort = state.keys.keys() & federation.members
    if not state.is_gathered or state.is_shared:
        return state, []
    if not rounds.is_enough(
        federation, state.shares.keys(), federation.present & cohort, len(cohort)
    ):
        return state, []
    scarce = scarce_classes(state.keys[node].classes for node in state.shares)
    warned: list[MaskingEffect] = [Scarce(scarce)] if scarce else []
    if scarce and federation.round in federation.plan.of_all:
        return state, warned
    state = state._replace(is_shared=True)
    told = [Say(node, _tell_shares(state, node)) for node in sorted(state.shares)]
    senders = frozenset(state.shares)
    return state, [*warned, RecordMasks(_facts(state), senders), Narrowed(senders), *told]


def _name_survivors(state: Masking, federation: Federation) -> Step:
    if state.survivors or federation.status is not Status.UNMASKING:
        return state, []
    if unreadable := find_unreadable(state, federation.contributed):
        return state, [Unreadable(unreadable)]
    state = state._replace(survivors=tuple(sorted(federation.contributed)))
    told = [Say(node, _say(state, survivors=state.survivors)) for node in state.survivors]
    return state, [RecordMasks(_facts(state)), *told]


def _agree(state: Masking, federation: Federation) -> Step:
    if (
        not state.survivors
        or state.agreed
        or len(state.signed) < state.threshold
        or federation.held
    ):
        return state, []
    state = state._replace(agreed={node: state.signed[node] for node in sorted(state.signed)})
    told = [Say(node, _say(state, signatures=dict(state.agreed))) for node in state.survivors]
    return state, [RecordMasks(_facts(state)), *told]


def _read(state: Masking, federation: Federation) -> Step:
    known = len(state.revealed)
    if known < state.threshold or known == state.tried or federation.held:
        return state, []
    state = state._replace(tried=known)
    return state, [Unmask(state)]


def find_unreadable(state: Masking, left: Set[str]) -> list[str]:
    """Nodes of whose neighbours fewer than half are `left`."""
    count = count_neighbours(state.neighbours, len(state.keys))
    if count == len(state.keys) - 1:
        return []
    return sorted(
        node for node, shares in state.shares.items() if 2 * len(left & shares.keys()) < count
    )


def _shares_for(state: Masking, node: str) -> dict[str, str]:
    return {sender: shares[node] for sender, shares in state.shares.items() if node in shares}


def _tell_shares(state: Masking, node: str) -> MaskingStep:
    return _say(state, counted=tuple(sorted(state.shares)), shares=_shares_for(state, node))


def _say(state: Masking, **what: object) -> MaskingStep:
    return MaskingStep(run=state.run, round=state.round, **what)  # type: ignore[arg-type]


def _facts(state: Masking) -> Facts:
    shares = dict(state.shares) if state.is_shared else {}
    return Facts(dict(state.keys), shares, state.survivors, dict(state.agreed))
