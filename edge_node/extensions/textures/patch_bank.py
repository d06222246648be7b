"""The bank of patches (FedTFI, section 3.1): bounded, the same whatever came first,
and fair to all nodes. numpy only.

A bank is three tensors of the broadcast: `bank.patches` [capacity, C, m, m], `bank.labels` and
`bank.owners` [capacity], both -1 in places that are empty. An owner is 24 bits of a node's name,
hashed; float32 holds them exactly.

It is a queue: of each node its newest patches, as many as of every other one that has as many;
older patches stay while there is room. Those of a node that was to contribute to the closed round
and did not are dropped.
"""

import hashlib
from collections.abc import Collection, Mapping

import numpy as np

from trainer.models.named_tensors import Arrays

VALUES = "patches.values"
LABELS = "patches.labels"
"""What a node sends: [quota, C, m, m] and [quota]; a label of -1 stands for no patch."""

MAX_VALUE = 256.0
"""Of a patch's values.

VGG19's maps, which the channels are weighted sums of, are about 1 in the mean.
"""

_OWNER_BYTES = 3


def hash_owner(node: str) -> int:
    """The number that stands for a node in a bank."""
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=_OWNER_BYTES).digest(), "big")


def make_empty_bank(capacity: int, channels: int, side: int) -> Arrays:
    """The first bank."""
    nobody = np.full(capacity, -1, np.float32)
    return {
        "bank.patches": np.zeros((capacity, channels, side, side), np.float32),
        "bank.labels": nobody,
        "bank.owners": nobody.copy(),
    }


def check(sent: Arrays, classes: int) -> None:
    """What a node sends, finite and of the right shapes.

    Raises:
        ValueError: a label that is none of -1 .. classes - 1, or a value beyond +-LARGEST.
    """
    labels = sent[LABELS]
    values = sent[VALUES]
    wrong = labels[(labels != np.rint(labels)) | (labels < -1) | (labels >= classes)]
    if len(wrong):
        raise ValueError(
            f"a patch is labelled {wrong[0]:g}; labels are 0 to {classes - 1}, or -1 for no patch"
        )
    if values.size and not float(np.abs(values).max()) <= MAX_VALUE:
        raise ValueError(f"a patch holds a value beyond +-{MAX_VALUE:g}; its training has diverged")


def merge(broadcast: Arrays, sent: Mapping[str, Arrays], absent: Collection[str]) -> Arrays:
    """The bank that follows the broadcast's: what was sent, by node, goes before what is there.

    Args:
        broadcast: holds the bank so far.
        sent: by nodes, each in the order in which their patches count as newer.
        absent: nodes whose patches go.
    """
    labels = broadcast["bank.labels"]
    owners = broadcast["bank.owners"]
    stays = (labels >= 0) & ~np.isin(owners, [hash_owner(node) for node in absent])
    parts = [
        (sent[node][VALUES], sent[node][LABELS], float(hash_owner(node))) for node in sorted(sent)
    ]
    every = {
        "bank.patches": np.concatenate(
            [*(each[0] for each in parts), broadcast["bank.patches"][stays]]
        ),
        "bank.labels": np.concatenate([*(each[1] for each in parts), labels[stays]]),
        "bank.owners": np.concatenate(
            [*(np.full_like(each[1], each[2]) for each in parts), owners[stays]]
        ),
    }
    # A name can be found that shares another's 24 bits: who has it must not take the other one's
    # places.
    senders = {owner: number for number, (_, _, owner) in enumerate(parts)}
    numbers = [np.full(len(each[1]), number) for number, each in enumerate(parts)]
    numbers.append(np.array([senders.get(owner, -1) for owner in owners[stays].tolist()], int))
    _, ranks = np.unique(
        np.column_stack([every["bank.owners"], np.concatenate(numbers)]),
        axis=0,
        return_inverse=True,
    )
    kept = _order_fairly(ranks.ravel(), every["bank.labels"] >= 0)[: len(labels)]
    following = make_empty_bank(*broadcast["bank.patches"].shape[:3])
    for name, values in following.items():
        values[: len(kept)] = every[name][kept]
    return following


def _order_fairly(owners: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Places of the patches that count: everybody's newest first,
    then everybody's second newest, and so on.
    """
    places = np.flatnonzero(counts)
    by_owner = places[np.argsort(owners[places], kind="stable")]
    sorted_owners = owners[by_owner]
    age = np.arange(len(by_owner)) - np.searchsorted(sorted_owners, sorted_owners)
    return by_owner[np.lexsort((sorted_owners, age))]


def remove_own_patches(broadcast: Arrays, node: str) -> Arrays:
    """The broadcast as `node` sees it: its own patches are none."""
    labels = np.where(
        broadcast["bank.owners"] == hash_owner(node), np.float32(-1), broadcast["bank.labels"]
    )
    return {**broadcast, "bank.labels": labels}
