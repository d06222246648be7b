"""Memory of the C library, out of Python's hands: large images come and go,
and should leave nothing behind.
"""

import contextlib
import ctypes

# mallopt's names for them
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_LARGE = 4 << 20  # bytes


def map_large_blocks() -> None:
    """Have large blocks mapped one by one from now on,
    so that each is returned as soon as it is free.

    Otherwise glibc takes the first large image as a sign that such blocks belong into its heap,
    which the small blocks between them then keep from shrinking.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def share_heap() -> None:
    """Have threads that start from now on share the heaps that there are,
    so that each takes what another has freed.

    By default glibc gives each a heap of its own: two that train in turn hold what two batches
    need.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return free memory to the system: loading two fused MobileNetV2 takes 82 MB,
    28 of which are then free.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
