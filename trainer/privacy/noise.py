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


def quantise(
    values: Doubles, levels: int, low: Doubles, high: Doubles, dither: Doubles | float = 0.5
) -> Doubles:
    """One of so many levels, evenly spread from `low` to `high` of each column;
    what lies beyond is cut.

    With a dither of 0.5 that is the nearest level. With one drawn from [0, 1) for each value it is
    the level below or above, by chance, such that the value is what comes out in the mean
    (non-subtractive dither).

    The range is a column's own: one for the whole message would hang on its one extreme product,
    and columns that vary little would lose all they tell.
    """
    width = high - low
    place = (np.clip(values, low, high) - low) / np.where(width > 0, width, 1) * (levels - 1)
    index = np.minimum(np.floor(place + dither), levels - 1)
    return np.where(index == levels - 1, high, low + width * (index / (levels - 1)))
