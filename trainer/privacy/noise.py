"""Normal random numbers that follow from a secret, for noise that hides what leaves a machine.

They come from a cryptographic stream and not from a statistical generator, whose state could be
told from its output. Whoever asks again for the same key hears the same numbers, so that a process
that was killed says nothing new.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST_SECRET = 16  # bytes

Doubles = NDArray[np.float64]


def derive_key(secret: bytes, *parts: bytes) -> bytes:
    """A key of its own for each sequence of parts;
    ValueError for a secret that could be guessed.
    """
    if len(secret) < _LEAST_SECRET:
        raise ValueError("noise that hides something needs a secret of its own")
    hashed = hashlib.blake2b(key=secret)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


def draw_normal(keys: Sequence[bytes], width: int) -> Doubles:
    """Normal numbers [keys, width], a row for each key (SHAKE-256, Box and Muller)."""
    half = -(-width // 2)
    stream = b"".join(hashlib.shake_256(key).digest(16 * half) for key in keys)
    bits = np.frombuffer(stream, "<u8").reshape(len(keys), 2, half)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53
    radius = np.sqrt(-2 * np.log(uniform[:, 0]))
    angle = 2 * np.pi * uniform[:, 1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :width]
