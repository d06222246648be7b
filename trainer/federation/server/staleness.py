"""Contributions to closed rounds, made fit for the open one: asynchronous federation. numpy only.

FedBuff (Nguyen et al. 2022, Alg. 1), with its buffer as the quorum: what a node has changed is added to a newer
broadcast than it was trained from, and counts the less the older it is.
"""

import math

import numpy as np

from trainer.models.named_tensors import Arrays


def discount(behind: int) -> float:
    """How much of an update counts that is so many rounds behind, 0..1: (1 + behind)^(-1/2)."""
    return 1 / math.sqrt(1 + behind)


def rebase(tensors: Arrays, trained_from: Arrays, broadcast: Arrays, behind: int) -> Arrays:
    """A contribution as if it had been trained from the open round's broadcast.

    Args:
        tensors: as they were contributed; those of no broadcast stay as they are.
        trained_from: the broadcast that they were trained from.
        broadcast: that of the open round.
        behind: rounds between the two.

    Returns:
        broadcast + discount * (tensors - trained_from), float32; variances that come out negative are 0.
    """
    share = discount(behind)
    rebased = {}
    for name, values in tensors.items():
        if name not in broadcast:
            rebased[name] = values
            continue
        update = values.astype(np.float64) - trained_from[name]
        moved = np.asarray(broadcast[name] + share * update, np.float32)
        rebased[name] = np.maximum(moved, 0) if name.endswith("running_var") else moved
    return rebased
