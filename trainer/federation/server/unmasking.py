"""Removal of the masks from a round's sum, with what enough of its nodes have revealed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations, islice

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import PublicKeys
from broker_config.security import mask_keys
from broker_config.security.mask_keys import Scope
from broker_config.security.secret_sharing import Interpolation
from trainer.federation.masking import shares_needed
from trainer.federation.server.coordinator.masking_state import Masking


def masks_in_sum(
    state: Masking, scope: Scope, secrets: dict[str, bytes]
) -> list[tuple[bytes, int]] | None:
    """Seed and sign of each mask that has to be added to the sum so that none is left;
    None until enough is revealed.

    Args:
        state: of the round.
        scope: the round.
        secrets: of the nodes, as far as an earlier attempt has found them; those that this one
            finds are added.

    Raises:
        EdgeNodeError: all survivors have revealed what they know, and it does not make the nodes'
            secrets.
    """
    if not _recover(state, secrets):
        if len(state.revealed) < len(state.survivors):
            return None
        raise EdgeNodeError(
            f"the masks of round {state.round} cannot be taken away: what its nodes have "
            "revealed makes no secrets of theirs",
            "some of them lie, and behind masks nobody can tell which: end this run with "
            "edge-node abort",
        )
    own = [(mask_keys.own_seed(scope, secrets[node], node), -1) for node in state.survivors]
    pairs = list(
        chain.from_iterable(
            mask_keys.pair_masks(scope, secrets[gone], gone, _partners(state, gone))
            for gone in sorted(state.shares.keys() - {*state.survivors})
        )
    )
    return own + pairs


def _partners(state: Masking, node: str) -> dict[str, str]:
    """Public keys of the survivors that have a mask with a node:
    one of the two shares its secrets with the other.
    """
    return {
        other: state.keys[other].agreement
        for other in state.survivors
        if other in state.shares[node] or node in state.shares[other]
    }


def _recover(state: Masking, secrets: dict[str, bytes]) -> bool:
    """Find of each survivor the secret of its own mask,
    of each other the one that its pairs' masks follow from.

    Returns:
        Whether all are found.
    """
    at = mask_keys.points(list(state.keys))
    needed = shares_needed(state.threshold, state.neighbours, len(state.keys))
    counts = Counter(chain.from_iterable(state.revealed.values()))
    if any(counts[node] < needed for node in state.shares):
        return False
    prepare = lru_cache(Interpolation)
    for node in state.shares.keys() - secrets.keys():
        shares = {
            at[by]: bytes.fromhex(told[node])
            for by, told in sorted(state.revealed.items())
            if node in told
        }
        for points in _choose(sorted(shares), needed):
            secret = _combine(
                prepare(points), shares, state.keys[node], is_survivor=node in state.survivors
            )
            if secret is not None:
                secrets[node] = secret
                break
    return state.shares.keys() <= secrets.keys()


def _choose(points: Sequence[int], threshold: int) -> Iterator[tuple[int, ...]]:
    """The shares that are tried: the first ones, then others,
    so that a false one among them is left out.
    """
    if len(points) >= threshold:
        yield tuple(points[:threshold])
    others = chain.from_iterable(
        combinations(points[end - threshold - 1 : end], threshold)
        for end in range(threshold + 1, len(points) + 1)
    )
    # enough for one that lies; more would hold the coordinator up
    yield from islice(others, 2 * threshold)


def _combine(
    interpolation: Interpolation,
    shares: Mapping[int, bytes],
    keys: PublicKeys,
    *,
    is_survivor: bool,
) -> bytes | None:
    """The secret that fits a node's keys; None if these shares do not make it."""
    try:
        secret = interpolation.combine(shares)
    except ValueError:
        return None
    if is_survivor:
        return secret if mask_keys.commitment(secret) == keys.commitment else None
    return secret if mask_keys.public_key(secret) == keys.agreement else None
