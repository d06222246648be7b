"""Tensors that a round's broadcast and the contributions to it hold."""

import hashlib
from collections.abc import Mapping

import msgspec

from broker_config.protocol.messages import Spec, TensorSpec

# of a masked contribution, in whole parts of the largest one that a method allows
MASKED_WEIGHT = "masked.weight"
BOUND_REVISION = 2  # of the protocol, from which masks and noise are bound to the spec
NO_BASE = hashlib.sha256(b"").hexdigest()  # the base of a delta that makes a broadcast of nothing


def is_statistics_round(spec: Spec, round_: int) -> bool:
    """Whether nodes contribute their statistics to this round instead of training:
    the last one, or also the first.
    """
    return bool(spec.statistics) and (
        round_ == spec.rounds or (spec.statistics_first and round_ == 1)
    )


def count_training_rounds(spec: Spec) -> int:
    """Rounds in which nodes train."""
    return spec.rounds - bool(spec.statistics) - spec.statistics_first


def contribution_tensors(spec: Spec, round_: int) -> Mapping[str, TensorSpec]:
    """What a node's contribution to this round holds; nothing if it bears no blob."""
    if is_statistics_round(spec, round_):
        return spec.statistics
    shared = {}
    for name, tensor in spec.tensors.items():
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in spec.sends):
            shared[name] = tensor
    return {**shared, **spec.relays}


def masked_tensors(spec: Spec, round_: int) -> Mapping[str, TensorSpec]:
    """What a masked contribution to this round holds, on the grid that it is summed on."""
    tensors = contribution_tensors(spec, round_)
    if is_statistics_round(spec, round_):
        return tensors
    words = {
        name: TensorSpec(tensor.shape, tensor.scale, "uint32") for name, tensor in tensors.items()
    }
    return {**words, MASKED_WEIGHT: TensorSpec((), 0, "uint32")}


def broadcast_tensors(spec: Spec, round_: int) -> Mapping[str, TensorSpec]:
    """What the broadcast that this round starts from holds;
    `spec.rounds` + 1 stands for the run's result.
    """
    holds_totals = round_ > spec.rounds or (spec.first_totals and round_ > 1)
    return {**spec.tensors, **spec.statistics} if holds_totals else spec.tensors


def needed_revision(spec: Spec) -> int:
    """The revision of the protocol that a member of this federation must know."""
    if hides_contributions(spec):
        return BOUND_REVISION
    return BOUND_REVISION if spec.chooses else int(spec.first_totals)


def hides_contributions(spec: Spec) -> bool:
    """Whether masks or noise hide what a member contributes."""
    return spec.mask_threshold > 0 or spec.privacy is not None


def predates_binding(spec: Spec) -> bool:
    """Return whether masks or noise of a run are of an earlier version, and could hide two things.

    The masks and noise of today's runs follow from the digest of the spec.
    """
    return hides_contributions(spec) and spec.revision < BOUND_REVISION


def basis(spec: Spec, broadcast: str) -> str:
    """What a node's statistics were computed with:
    SHA-256 over a broadcast's digest and the spec's preprocessing.
    """
    return hashlib.sha256(broadcast.encode() + msgspec.json.encode(spec.preprocessing)).hexdigest()
