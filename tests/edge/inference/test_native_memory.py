"""The C library gives memory back, or to whoever asks next."""

import platform
import subprocess
import sys

import pytest

IN_TURN = """
import os, sys, threading
from edge.inference import native_memory

if sys.argv[1] == "shared":
    native_memory.share_heap()

def work():
    held = [os.urandom(100_000) for _ in range(400)]  # 40 MB in blocks that are too small to be mapped
    kept.append(held.pop())  # which keeps the heap from shrinking

kept = []
for _ in range(4):  # one ends, the others wait: a thread that ends would leave its heap to the next one
    done, stay = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (work(), done.set(), stay.wait()), daemon=True).start()
    done.wait()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) // 1000, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have one heap")
def test_threads_that_share_a_heap_take_what_another_has_freed() -> None:
    shared, apart = (peak_memory(how) for how in ("shared", "apart"))
    assert apart - shared > 80


def peak_memory(how: str) -> int:
    """MB."""
    return int(subprocess.run([sys.executable, "-c", IN_TURN, how], capture_output=True, text=True, check=True).stdout)
