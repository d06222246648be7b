"""Random numbers by key: the same (seed, key) gives the same numbers,
in whatever order and process.
"""

import hashlib

import numpy as np


def key_to_seed(seed: int, *key: str | int) -> int:
    """A 63-bit seed for this `key`, e.g. (node, round, phase)."""
    text = "\x1f".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *key: str | int) -> np.random.Generator:
    """A numpy generator for this `key`."""
    return np.random.default_rng(key_to_seed(seed, *key))
