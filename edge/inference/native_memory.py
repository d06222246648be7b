"""The C library's memory, which Python leaves to it: large images come and go, and should leave nothing behind."""

import contextlib
import ctypes

_MMAP_THRESHOLD = -3  # mallopt's name for it
_LARGE = 4 << 20  # bytes


def steady() -> None:
    """From now on give large blocks back as soon as they are free.

    Otherwise glibc takes the first large image as a sign that such blocks belong into its heap, where the small ones
    that lie between them keep it from shrinking.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def tidy() -> None:
    """Give back what is free: loading a model takes more than the model, 28 MB of 82, of two fused MobileNetV2."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
