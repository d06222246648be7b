"""Masks of contributions: words that nobody without their seed can tell from random ones,
added modulo 2^32 or 2^64.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from trainer.models.named_tensors import Arrays

_WORDS = {"uint32": "<u4", "int64": "<u8"}
_START = bytes(16)  # counter and nonce: a seed makes one stream


def apply_masks(words: Mapping[str, np.ndarray], masks: Iterable[tuple[bytes, int]]) -> Arrays:
    """Words with masks added.

    A mask is the keystream of ChaCha20 (RFC 8439) under its seed, cut into the words of one tensor
    after the other, in the order of their names, little-endian.

    Args:
        words: uint32 or int64.
        masks: seed (32 bytes) and sign (1 or -1) of each.
    """
    masked = {name: np.array(words[name], _WORDS[words[name].dtype.name]) for name in sorted(words)}
    for seed, sign in masks:
        stream = Cipher(ChaCha20(seed, _START), mode=None).encryptor()
        operation = np.add if sign > 0 else np.subtract
        for each in masked.values():
            drawn = np.frombuffer(stream.update(bytes(each.nbytes)), each.dtype).reshape(each.shape)
            operation(each, drawn, out=each)
    return {name: each.view(words[name].dtype) for name, each in masked.items()}
