"""Agreement of the batched engine with the plain one, to rounding."""

from typing import NamedTuple

import numpy as np
import pytest

from broker_config.protocol.messages import Spec
from trainer.data.class_folders import Images
from trainer.methods.base import Metrics
from trainer.models.named_tensors import Arrays, add_prefix
from trainer.models.network import to_arrays
from trainer.training import batched_engine
from trainer.training.participant import Participant

# Of the distance between two nodes. Rounding alone gives a few 1e-5, since Adam's first steps make
# whole steps of tiny gradients; another node's images, order or augmentation would give about 1.
TOLERANCE = 1e-3


class Ended(NamedTuple):
    """A node after the last round."""

    tensors: Arrays  # its own, and those that it sent
    metrics: Metrics


def train(spec: Spec, broadcast: Arrays, nodes: dict[str, Images], most: int) -> dict[str, Ended]:
    """All rounds from the same broadcast, at most so many nodes at once."""
    ended = {}
    for group in batched_engine.group_nodes(
        [Participant(spec, name, share) for name, share in nodes.items()], most
    ):
        states = [Participant(spec, name, nodes[name]).start(broadcast) for name in group.nodes]
        for round_ in range(1, spec.rounds + 1):
            stage_1 = group.contribute(states, broadcast, round_)
            stage_2 = group.refine([state for state, _, _ in stage_1], broadcast, round_)
            states = [state for state, _ in stage_2]
        for name, (_, sent, first), (state, second) in zip(
            group.nodes, stage_1, stage_2, strict=True
        ):
            tensors = {**to_arrays(state.tensors), **add_prefix("sent", sent.tensors)}
            ended[name] = Ended(tensors, {**first, **second, "weight": sent.weight})
    return ended


def assert_engines_agree(spec: Spec, broadcast: Arrays, nodes: dict[str, Images]) -> None:
    plain, together = (
        train(spec, broadcast, nodes, most) for most in (1, batched_engine.MAX_GROUP_NODES)
    )
    for name, other in zip(nodes, reversed(nodes), strict=True):
        assert together[name].metrics == pytest.approx(plain[name].metrics, rel=1e-5)
        for tensor, values in plain[name].tensors.items():
            distance = np.linalg.norm(values - together[name].tensors[tensor])
            # of a weight of about 1: which are rounded depends on the processor
            last_bit = np.finfo(np.float32).eps
            assert (
                distance
                <= TOLERANCE * np.linalg.norm(values - plain[other].tensors[tensor]) + last_bit
            ), tensor
