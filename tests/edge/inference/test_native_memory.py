"""The C library gives memory back, or to whoever asks next."""

import platform
import subprocess
import sys

import pytest

IN_TURN = """
import ctypes, os, sys, threading
from edge.inference import native_memory

if sys.argv[1] == "shared":
    native_memory.share_heap()

def work():
    held = [os.urandom(100_000) for _ in range(400)]  # 40 MB in blocks that are too small to be \
mapped
    kept.append(held.pop())  # which keeps the heap from shrinking

kept = []
for _ in range(4):  # one ends, the others wait: a thread that ends would leave its heap to the \
next one
    done, stay = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (work(), done.set(), stay.wait()), daemon=True).start()
    done.wait()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
os._exit(0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have one heap")
def test_threads_that_share_a_heap_take_what_another_has_freed() -> None:
    assert count_heaps("shared") == 1
    assert count_heaps("apart") > 1


def count_heaps(how: str) -> int:
    """As the C library lists them."""
    told = subprocess.run(
        [sys.executable, "-c", IN_TURN, how], capture_output=True, text=True, check=True
    ).stdout
    return told.count("<heap nr=")
