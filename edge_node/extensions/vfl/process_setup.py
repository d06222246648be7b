"""Process settings of a head or a sensor that takes part in many rounds a second."""

import gc
import sys

import torch

EVENT_QUEUE = 1 << 27  # bytes of events that wait for the main thread
_SWITCH = 5e-4  # seconds that Python's other thread may keep the network waiting


def set_up_process(threads: int) -> None:
    """Set this process up."""
    torch.set_num_threads(threads)
    sys.setswitchinterval(_SWITCH)
    gc.freeze()  # else every collection goes through all of torch, in the middle of a round
